"""Options that would do nothing, each with what was meant. Runs anywhere.

`check_effects` looks at the options alone, when they are made; `check_for` at the data that they
meet, before any rank starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from gpupool.core.errors import OptionsError
from gpupool.core.options.named_measures import name_of


class Needs(NamedTuple):
    """Another option that an option works with only: one of `values`, or any that is given.

    `meant` is what to choose for the other one.
    """

    other: str
    values: tuple[str, ...]
    meant: str


_NEED_VALIDATION = ("patience", "objective", "validate_every", "metrics")


def check_effects(options: Any) -> None:
    """Refuse options that do nothing beside the others, or exclude each other.

    Args:
        options: `TrainingOptions`.
    """
    # Only of what was given: a default that does nothing was nobody's wish.
    for one in fields(options):
        needs = one.metadata["needs"]
        if needs is None or not is_given(options, one.name):
            continue
        other = getattr(options, needs.other)
        if not (other in needs.values if needs.values else is_given(options, needs.other)):
            shown = getattr(other, "__name__", None) or repr(other)
            why = f"while {needs.other} is {shown}: did you mean {needs.other}={needs.meant}?"
            raise _without_effect(options, one.name, why)
    _check_objective(options)
    _check_conflicts(options)


def check_for(options: Any, *, has_validation: bool, num_samples: int | None) -> None:
    """Refuse options that do nothing with this data.

    Args:
        options: `TrainingOptions`.
        num_samples: None where nobody knows it, of a stream.

    Raises:
        OptionsError: with what was meant.
    """
    if not has_validation:
        names = [name for name in _NEED_VALIDATION if is_given(options, name)]
        # Not by `is_given`: keep="last" is what happens without validation, and does no harm.
        names += ["keep"] if options.keep == "best" else []
        for name in names:
            raise _without_effect(
                options, name, "without validation data: did you mean train(..., validation=...)?"
            )
    if num_samples is None and options.workers is not None:
        raise _without_effect(
            options, "workers", "on a stream, which every rank walks through alone: leave it out."
        )
    if num_samples and options.max_steps is not None:
        per_epoch = -(-num_samples // options.batch_size)
        planned = options.epochs * per_epoch
        if options.max_steps > planned:
            raise _without_effect(
                options,
                "max_steps",
                f"while epochs is {options.epochs}, which are {planned:,} steps: did you mean "
                f"epochs={-(-options.max_steps // per_epoch)}?",
            )


def is_given(options: Any, name: str) -> bool:
    """Whether an option has another value than the one it has when left out."""
    default = options.__dataclass_fields__[name].default
    # A dataclass does not record what was passed: a default that was typed counts as left out.
    return bool(getattr(options, name) != ({} if default is MISSING else default))


def _without_effect(options: Any, name: str, why: str) -> OptionsError:
    return OptionsError(f"{name}={getattr(options, name)!r} has no effect {why}")


def _check_objective(options: Any) -> None:
    """A name that no validation has, as far as the names are known here."""
    metrics = options.metrics
    # Outputs and collections name their values only when these are computed.
    if isinstance(metrics, Mapping) or any(hasattr(metric, "compute") for metric in metrics):
        return
    known = list(dict.fromkeys(["loss", "accuracy", *map(name_of, metrics)]))
    if options.objective not in known:
        raise OptionsError(
            f"objective={options.objective!r} is not measured: choose one of {', '.join(known)}, "
            f"or add it: metrics=[{options.objective!r}]."
        )


def _check_conflicts(options: Any) -> None:
    # The URL of one checkpoint names its own place, so it needs no folder.
    resumes = options.resume in (True, "auto")
    if resumes and options.checkpoint is None:
        raise _without_effect(
            options,
            "resume",
            "while checkpoint is None: did you mean checkpoint='s3://bucket/run1', the folder to "
            "resume from?",
        )
    if resumes and options.overwrite:
        raise OptionsError(
            f"overwrite=True begins from scratch, and resume={options.resume!r} does not: leave "
            "one of them out."
        )
    if options.accumulate > options.batch_size:
        raise OptionsError.of(
            "accumulate",
            options.accumulate,
            f"a batch of {options.batch_size} cannot be computed in more parts than it has "
            "samples.",
        )
    if options.weights is not None and options.shuffle == "never":
        raise OptionsError(
            "weights and shuffle='never' exclude each other: weights draw the order of an epoch. "
            "Leave one of them out; shuffle='once' draws it once."
        )
    if options.gather and options.accumulate > 1:
        raise OptionsError(
            "gather=True has the loss of the whole batch at once, and accumulate="
            f"{options.accumulate} computes it in parts: leave one of them out."
        )
    if options.deterministic and str(options.compile).startswith("max-autotune"):
        raise OptionsError(
            f"deterministic=True and compile={options.compile!r} exclude each other: autotuning "
            "takes the kernels that were fastest, which differ from run to run. Did you mean "
            "compile=True?"
        )
