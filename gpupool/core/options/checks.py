"""Kinds of values that options take, each with the sentence for any other value. Runs anywhere.

A check gets an option's name and value, and gives the value as it is kept: a plain number, a tuple,
a text. Words come as a `Literal`.
"""

from __future__ import annotations

import inspect
import math
import re
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

from gpupool.core.errors import OptionsError
from gpupool.core.options import pool_options
from gpupool.core.options.pool_options import parse_duration_s

Check = Callable[[str, Any], Any]


def number(
    *,
    whole: bool = False,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> Check:
    """A finite number within limits."""
    limits = {"at least": least, "above": above, "below": below, "at most": most}
    said = [f"{name} {limit}" for name, limit in limits.items() if not math.isinf(limit)]

    def check(name: str, value: Any) -> int | float:
        pool_options.number(name, value, whole=whole)
        # NaN is refused as well, with which every comparison is False.
        if not (least <= value <= most and above < value < below):
            raise OptionsError.of(name, value, f"must be {' and '.join([*said, 'finite'])}.")
        return int(value) if whole else float(value)  # plain ones: numpy's would overflow

    return check


def word(words: Any) -> Check:
    """One of these words."""
    allowed = get_args(words)

    def check(name: str, value: Any) -> Any:
        if isinstance(value, str) and value not in allowed and value.lower() in allowed:
            raise OptionsError(
                f"{name}={value!r} is unknown. Did you mean {name}={value.lower()!r}?"
            )
        pool_options.one_of(name, value, allowed)
        return value

    return check


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise OptionsError.of(name, value, "must be True or False.")
    return value


def flag_or(words: Any) -> Check:
    """True, False, or one of these words."""
    return lambda name, value: value if isinstance(value, bool) else word(words)(name, value)


def function(arguments: str, example: str, words: Any) -> Check:
    """A function of one argument, or one of some words."""

    def check(name: str, value: Any) -> Any:
        made = getattr(value, "func", value)  # of a partial
        for module, kind in (("optimizer", "Optimizer"), ("lr_scheduler", "LRScheduler")):
            is_object = not isinstance(made, type)
            if _is_a(made, f"torch.optim.{module}", kind) and (is_object or kind != "Optimizer"):
                raise OptionsError(
                    f"{name}={getattr(made, '__name__', type(made).__name__)} is of parameters "
                    "that the ranks do not have: write optimizer=torch.optim.Adam, and "
                    "schedule='cosine' or schedule=lambda step: factor, which is multiplied with "
                    "lr."
                )
        if not callable(value):
            return word(words)(name, value)
        if not _can_be_called(value):
            shown = getattr(value, "__qualname__", None) or type(value).__qualname__
            raise OptionsError(
                f"{name}={shown} cannot be called with one argument, the {arguments}: write "
                f"{name}={example}."
            )
        return value

    return check


def _is_a(value: object, module: str, name: str) -> bool:
    """Whether `value` is a class, or an object of one, that derives from `module.name`."""
    # By name: torch is not imported for this.
    kind = value if isinstance(value, type) else type(value)
    return any((one.__module__, one.__name__) == (module, name) for one in kind.__mro__)


def _can_be_called(value: Any) -> bool:
    """Whether `value` takes one argument by position, as far as Python can know it."""
    try:
        inspect.signature(value).bind(0)
    except TypeError:
        return False
    except ValueError:  # a function of C without a signature
        return True
    return True


def any_function(name: str, value: Any) -> Any:
    """A function, of whatever arguments."""
    if not callable(value):
        raise OptionsError.of(name, value, "must be a function.")
    return value


def factors(name: str, value: Any) -> dict[str, float]:
    """Factors by patterns of parameter names; 0 freezes the parameters that match."""
    if not isinstance(value, Mapping) or not all(isinstance(pattern, str) for pattern in value):
        raise OptionsError.of(name, value, "give a dict of patterns, as {'head.*': 10}.")
    check = number(least=0)
    return {pattern: check(f"{name}[{pattern!r}]", factor) for pattern, factor in value.items()}


def warmup(name: str, value: Any) -> Any:
    """Epochs or steps, as `warmup_of` reads them."""
    warmup_of(value)
    return value


def warmup_of(value: str | int) -> tuple[int, str]:
    """The number and unit, "epoch" or "step", of a warm-up.

    >>> warmup_of("2 epochs"), warmup_of("500 steps"), warmup_of(7)
    ((2, 'epoch'), (500, 'step'), (7, 'step'))
    """
    match = re.fullmatch(r"\s*(\d+)\s*(epoch|step)?s?\s*", str(value))
    if isinstance(value, bool) or not match or int(match[1]) < 1:
        raise OptionsError.of("warmup", value, "write '1 epoch', '500 steps' or a number of steps.")
    return int(match[1]), match[2] or "step"


def interval(*, or_time: bool = False) -> Check:
    """ "epoch" or a number of steps; with `or_time` a time, too."""

    def check(name: str, value: Any) -> str | int:
        if not isinstance(value, str):
            return int(number(whole=True, least=1)(name, value))
        # A time has a unit: "600" alone could be steps or seconds.
        is_time = or_time and value[-1:] in ("s", "m", "h", "d")
        if value == "epoch" or (is_time and parse_duration_s(value) is not None):
            return value
        also = ", or a time such as '10m'" if or_time else ""
        raise OptionsError.of(name, value, f"write 'epoch' or a number of steps{also}.")

    return check


def resume(name: str, value: Any) -> str | bool:
    """True, False, "auto" or the place of a checkpoint."""
    if isinstance(value, bool):
        return value
    if value in ("yes", "true", "True", "no", "false", "False", "latest", "last"):
        raise OptionsError(
            f"{name}={value!r} would be the path of a checkpoint: did you mean {name}='auto'?"
        )
    return pool_options.folder_url(name, value)


def sample_weights(name: str, value: Any) -> str | array[float]:
    """A weight for each sample, as 8 bytes each: a data set may have millions; or "balanced"."""
    if isinstance(value, array):  # checked before
        return value
    if isinstance(value, str):
        return str(word(Literal["balanced"])(name, value))
    if hasattr(value, "tolist"):  # of torch, numpy and pandas
        value = value.tolist()
    try:
        found = array("d", () if isinstance(value, Mapping) else value)
    except TypeError:
        raise OptionsError(f"{name}: give one number for each sample.") from None
    bad = next((place for place, one in enumerate(found) if not 0 <= one < math.inf), None)
    if bad is not None:
        raise OptionsError(
            f"{name}: {found[bad]:g} of sample {bad} must be finite and not negative."
        )
    if not sum(found) > 0:
        raise OptionsError(f"{name}: one must be above 0.")
    return found


def inputs(name: str, value: Any) -> Any:
    """ "auto", or parts of a batch."""
    if isinstance(value, str) and value != "auto":
        raise OptionsError.of(name, value, f"a column by its name is {name}=({value!r},).")
    return value if isinstance(value, str) else _parts(name, value)


def part(name: str, value: Any) -> str | int:
    """The name or number of a part of a batch."""
    return _parts(name, (value,))[0]


def _parts(name: str, value: Any) -> tuple[str | int, ...]:
    parts = tuple(value) if isinstance(value, Iterable) else ()
    if not parts or not all(isinstance(one, str | int) for one in parts):
        raise OptionsError.of(
            name,
            value,
            "give names of columns, as ('input_ids', 'attention_mask'), or numbers, as (0, 1).",
        )
    return parts


def metrics(name: str, value: Any) -> Any:
    """One or several metrics as a tuple; of several outputs as a dict."""
    # A collection of torchmetrics can be walked through, and is one of them.
    if isinstance(value, str) or callable(value) or not isinstance(value, Iterable):
        return (value,)
    return dict(value) if isinstance(value, Mapping) else tuple(value)


def callbacks(name: str, value: Any) -> tuple[Any, ...]:
    """One or several functions."""
    found = (value,) if callable(value) or not isinstance(value, Iterable) else tuple(value)
    for one in found:
        if not callable(one):
            raise OptionsError(f"{name}: {one!r} cannot be called; give functions of info.")
    return found


def instance(kind: type, example: str) -> Check:
    """An object of a class."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            # Not the value, which may be a URL with a password in it.
            raise OptionsError(f"{name} is a {type(value).__name__}: give {example}.")
        return value

    return check
