"""Options that would do nothing with others or with these data, each with what was meant.

Runs anywhere. That an option needs another one stands beside it: `Needs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpupool.core.errors import OptionsError
from gpupool.core.options.checks import warmup_of
from gpupool.core.options.fields import is_given, without_effect
from gpupool.core.options.named_measures import name_of

_NEED_VALIDATION = ("patience", "objective", "validate_every", "metrics")
_TUNED = ("max-autotune", "max-autotune-no-cudagraphs")
_EXCLUDE: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (  # if the other has one of these
    ("overwrite", "resume", (True, "auto"), "one begins from scratch, the other does not"),
    ("weights", "shuffle", ("never",), "weights draw an order; shuffle='once' draws it once"),
    ("gather", "accumulate", (), "one has the loss of the whole batch, the other of parts"),
    ("deterministic", "compile", _TUNED, "autotuning picks other kernels; compile=True has none"),
)


def check_together(options: Any) -> None:
    """Refuse options that exclude each other, or do nothing together.

    Args:
        options: `TrainingOptions`.
    """
    resumes = options.resume in (True, "auto")  # the URL of a checkpoint names its own place
    if resumes and options.checkpoint is None:
        why = "while checkpoint is None: did you mean checkpoint='s3://bucket/run1'?"
        raise without_effect(options, "resume", why)
    for name, other, values, why in _EXCLUDE:
        value = getattr(options, other)
        if is_given(options, name) and (value in values if values else is_given(options, other)):
            raise OptionsError(f"{name} and {other}={value!r} exclude each other: {why}.")
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


def check_for(options: Any, *, has_validation: bool, num_samples: int | None) -> None:
    """Refuse options that do nothing with this data.

    Args:
        options: `TrainingOptions`.
        num_samples: None where nobody knows it, of a stream.

    Raises:
        OptionsError: with what was meant.
    """
    if not has_validation:
        # keep="last" is what happens without validation, and does no harm.
        names = ["keep"] * (options.keep == "best")
        for name in [*filter(lambda name: is_given(options, name), _NEED_VALIDATION), *names]:
            raise without_effect(
                options, name, "without validation data: did you mean train(..., validation=...)?"
            )
    if num_samples is None:
        _check_for_stream(options)
    per_epoch = -(-(num_samples or 0) // options.batch_size)
    planned = options.epochs * per_epoch
    if planned and options.max_steps is not None and options.max_steps > planned:
        raise without_effect(
            options,
            "max_steps",
            f"while epochs is {options.epochs}, which are {planned:,} steps: did you mean "
            f"epochs={-(-options.max_steps // per_epoch)}?",
        )


def _check_for_stream(options: Any) -> None:
    """Refuse what needs to know how many samples there are, or samples that ranks divide."""
    is_curve = options.schedule in ("cosine", "linear") and options.max_steps is None
    in_epochs = options.warmup is not None and warmup_of(options.warmup)[1] == "epoch"
    for name, is_so, meant in (
        ("workers", options.workers is not None, "each rank walks through all of it: leave it out"),
        ("schedule", is_curve, "give max_steps, or a callable"),
        ("warmup", in_epochs, "give a number of steps"),
    ):
        if is_so:
            raise OptionsError(f"{name}={getattr(options, name)!r} on a stream: {meant}.")
