"""What options need to know of a model, read off it without importing torch. Runs anywhere."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from gpupool.core.errors import OptionsError
from gpupool.core.options.training_options import TrainingOptions


def check_parameters(model: Any, options: TrainingOptions) -> None:
    """Raise OptionsError for patterns of the options that match no parameter."""
    names = [name for name, _ in model.named_parameters()]
    for option in ("weight_decay_factors", "learn_rate_factors"):
        match_factors(option, names, getattr(options, option))


def match_factors(
    option: str, names: Iterable[str], factors: Mapping[str, float]
) -> dict[str, float]:
    """The factor of each parameter: that of the last pattern that matches its name, else 1. An
    OptionsError for a pattern that matches none.

    >>> match_factors("learn_rate_factors", ["a.weight", "b.weight"], {"a.*": 0})
    {'a.weight': 0.0, 'b.weight': 1.0}
    """
    found = dict.fromkeys(names, 1.0)
    for pattern, factor in factors.items():
        matched = [name for name in found if fnmatchcase(name, pattern)]
        # An error, as a typo would else freeze or scale nothing, and nobody would notice.
        if not matched:
            some = [*found] if len(found) <= 8 else [*[*found][:4], "...", *[*found][-3:]]
            raise OptionsError(
                f"{option}: {pattern!r} matches no parameter. The model has: {', '.join(some)}."
            )
        found.update(dict.fromkeys(matched, float(factor)))
    return found


class Parameters(NamedTuple):
    """What the `forward` of a network takes: names of its arguments, and those it cannot be called
    without; `any_name`: it takes any other by name, too."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    any_name: bool


UNKNOWN = Parameters((), (), False)


def forward_parameters(model: Any) -> Parameters:
    """What the network's `forward` takes; nothing where that is not known, as of a scripted one."""
    # A network that PEFT has wrapped passes everything on to the one within.
    inner = getattr(model, "get_base_model", None)
    model = inner() if callable(inner) else getattr(model, "_orig_mod", model)
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return UNKNOWN
    kinds = inspect.Parameter
    named = [one for one in parameters if one.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    if not named and any(one.kind is kinds.VAR_POSITIONAL for one in parameters):
        return UNKNOWN
    return Parameters(
        tuple(one.name for one in named if one.kind is not kinds.POSITIONAL_ONLY),
        tuple(one.name for one in named if one.default is kinds.empty),
        any(one.kind is kinds.VAR_KEYWORD for one in parameters),
    )


def chosen_loss(loss: Any, model: Any) -> Any:
    """The loss that "auto" is for this network: its own, if it takes `labels`, as networks of
    Hugging Face do; else cross entropy. Any other loss stays."""
    if not isinstance(loss, str) or loss != "auto":
        return loss
    return "output" if "labels" in forward_parameters(model).names else "cross_entropy"
