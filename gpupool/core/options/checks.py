"""Kinds of values that options take, each with the sentence for any other value. Runs anywhere.

A check gets an option's name and value, and gives the value as it is kept.
"""

from __future__ import annotations

import difflib
import math
import numbers
import os
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from gpupool.core.errors import OptionsError
from gpupool.core.formatting import shortened
from gpupool.core.urls import refuse_typo, without_passwords

Check = Callable[[str, Any], Any]

# Our options -> what MATLAB, Keras, Lightning and Hugging Face call them, where that is not near.
OTHER_NAMES = {
    "lr": "learning_rate InitialLearnRate",
    "epochs": "num_train_epochs",
    "max_steps": "MaxIterations",
    "batch_size": "train_batch_size per_device_train_batch_size MiniBatchSize",
    "weight_decay": "weight_decay_rate L2Regularization",
    "schedule": "lr_scheduler scheduler LearnRateSchedule",
    "warmup": "warmup_steps",
    "accumulate": "gradient_accumulation_steps",
    "clip": "max_grad_norm GradientThreshold",
    "precision": "fp16 bf16 amp",
    "workers": "num_workers",
    "patience": "early_stopping ValidationPatience",
    "validate_every": "ValidationFrequency",
    "checkpoint": "output_dir",
    "collate": "collate_fn",
    "callbacks": "tensorboard log_with TensorBoardLogger",
}


def suggest(name: str, known: Iterable[str], where: str = "") -> str:
    """A sentence that names the word that is meant; else `where` all are, or all of them."""
    words = {_plain(word): word for word in known}
    key = _plain(name)
    ours = [one for one, theirs in OTHER_NAMES.items() if key in map(_plain, theirs.split())]
    near = difflib.get_close_matches(_plain(ours[0]) if ours else key, words, 1)
    if near:
        return f"Did you mean {words[near[0]]!r}?"
    return where or f"There are: {', '.join(words.values())}."


def _plain(name: str) -> str:
    """`NumEpochs` and `num_epochs` are one name."""
    return name.replace("_", "").replace("-", "").lower()


def choose(name: str, value: object, words: Sequence[str]) -> None:
    if value not in words:
        raise OptionsError(f"{name}={shown(value)} is unknown. {suggest(str(value), words)}")


def shown(value: object) -> str:
    return shortened(as_written(value), 80)


def as_written(value: Any) -> str:
    """A value as it would be written, without passwords; functions and objects by their names."""
    if isinstance(value, tuple | list):
        inner = ", ".join(map(as_written, value))
        comma = "," * (len(value) == 1)  # without it ('f1') would be text
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{comma})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {as_written(part)}' for name, part in value.items())}}}"
    if isinstance(value, array):  # of a number for each sample: too many to be shown
        return f"<{len(value):,} numbers>"
    if value is None or isinstance(value, (str, numbers.Number)) or is_dataclass(value):
        return without_passwords(repr(value))
    # Not the repr of an object, which may be long, or hold what nobody should read.
    name: str = getattr(value, "__qualname__", None) or type(value).__qualname__
    return name.rpartition("<locals>.")[2]  # not the function that has made it


def must(is_right: Callable[[Any], bool], advice: str) -> Check:
    def check(name: str, value: Any) -> Any:
        if not is_right(value):
            raise OptionsError(f"{name}={shown(value)}: {advice}")
        return value

    return check


flag = must(lambda value: isinstance(value, bool), "must be True or False.")
any_function = must(callable, "must be a function.")
part = must(lambda value: isinstance(value, str | int), "give the name or number of a part.")


def number(
    *,
    whole: bool = False,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> Check:
    limits = {"at least": least, "above": above, "below": below, "at most": most}
    said = [f"{name} {limit}" for name, limit in limits.items() if not math.isinf(limit)]
    advice = f"must be a {'whole' if whole else 'finite'} number {' and '.join(said)}"
    kind = numbers.Integral if whole else numbers.Real  # numpy's are registered; True is none

    def check(name: str, value: Any) -> int | float:
        is_one = isinstance(value, kind) and not isinstance(value, bool)
        # NaN is refused as well, with which every comparison is False.
        if not (is_one and least <= value <= most and above < value < below):
            raise OptionsError(f"{name}={shown(value)}: {advice.rstrip()}.")
        return int(value) if whole else float(value)  # plain ones: numpy's would overflow

    return check


def factors(name: str, value: Any) -> dict[str, float]:
    must(lambda given: isinstance(given, Mapping), "give a dict, as {'head.*': 10}.")(name, value)
    check = number(least=0)
    return {pattern: check(f"{name}[{pattern!r}]", factor) for pattern, factor in value.items()}


def sample_weights(name: str, value: Any) -> array[float]:
    """A weight for each sample, as 8 bytes each: a data set may have millions."""
    if hasattr(value, "tolist"):  # of torch, numpy and pandas
        value = value.tolist()
    try:
        found = array("d", () if isinstance(value, Mapping) else value)
    except TypeError:
        found = array("d")
    if not all(0 <= one < math.inf for one in found) or not sum(found) > 0:
        raise OptionsError(
            f"{name}: give one number for each sample, finite and not negative, and one above 0."
        )
    return found


def inputs(name: str, value: Any) -> str | tuple[str | int, ...]:
    """ "auto", or names or numbers of parts of a batch."""
    if value == "auto":
        return "auto"
    found = () if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if not found or not all(isinstance(one, str | int) for one in found):
        raise OptionsError(f"{name}={shown(value)}: give names, as ('input_ids',), or numbers.")
    return found


def one_or_several(name: str, value: Any) -> Any:
    """One or several names or objects as a tuple; of several outputs a dict."""
    # A collection of torchmetrics can be walked through, and is one of them.
    if isinstance(value, str) or callable(value) or not isinstance(value, Iterable):
        return (value,)
    return dict(value) if isinstance(value, Mapping) else tuple(value)


def functions(name: str, value: Any) -> tuple[Any, ...]:
    return tuple(any_function(name, one) for one in one_or_several(name, value))


_WARMUP = re.compile(r"\s*([1-9]\d*)\s*(epoch|step)?s?\s*")
warmup = must(
    lambda value: _WARMUP.fullmatch(str(value)) is not None,
    "write '1 epoch', '500 steps' or a number of steps.",
)


def warmup_of(value: str | int) -> tuple[int, str]:
    """The number and unit, "epoch" or "step", of a warm-up.

    >>> warmup_of("2 epochs"), warmup_of("500 steps"), warmup_of(7)
    ((2, 'epoch'), (500, 'step'), (7, 'step'))
    """
    ((number, unit),) = _WARMUP.findall(str(value))
    return int(number), unit or "step"


def parse_duration_s(value: str | float | None) -> float | None:
    """Seconds of "90s", "30m", "2h", "1d" or a plain number; None for "never" and None.

    >>> parse_duration_s("30m"), parse_duration_s("never"), parse_duration_s(5)
    (1800.0, None, 5.0)
    """
    if value is None or value == "never":
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", str(value))
    if not match or float(match[1]) <= 0:
        raise OptionsError(f"{value!r} is not a time. Write '90s', '30m', '2h' or 'never'.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def interval(name: str, value: Any) -> str | int:
    """ "epoch", a number of steps, or a time, which has a unit: "600" could be either."""
    if not isinstance(value, str):
        return int(number(whole=True, least=1)(name, value))
    if value == "epoch" or re.fullmatch(r"\d+(\.\d+)?[smhd]", value):
        return value
    advice = "write 'epoch', a number of steps, or a time as '10m'."
    raise OptionsError(f"{name}={shown(value)}: {advice}")


def folder(name: str, value: object) -> str:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path.strip():
        raise OptionsError(f"{name}={shown(value)}: must be a folder, as 's3://bucket/run1'.")
    refuse_typo(path, name)
    return path


def flag_or_folder(name: str, value: object) -> str | bool:
    return value if isinstance(value, bool) else folder(name, value)
