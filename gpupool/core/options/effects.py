"""Options that would do nothing with others or with these data, each with what was meant.

Runs anywhere. That an option needs another one stands beside it: `Needs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpupool.core.errors import OptionsError
from gpupool.core.options.fields import is_given, without_effect
from gpupool.core.options.named_measures import name_of

_NEED_VALIDATION = ("patience", "objective", "validate_every", "metrics")
_WHY = {  # of options that exclude others
    "overwrite": "one begins from scratch, the other does not",
    "accumulate": "a batch has no more parts than samples",
    "weights": "weights draw the order of an epoch; shuffle='once' draws it once",
    "gather": "one has the loss of the whole batch at once, the other computes it in parts",
    "compile": "which kernel autotuning finds fastest differs; compile=True has none",
}


def check_together(options: Any) -> None:
    """Refuse options that exclude each other, or do nothing together.

    Args:
        options: `TrainingOptions`.
    """
    # The URL of one checkpoint names its own place, so it needs no folder.
    if options.resume in (True, "auto") and options.checkpoint is None:
        raise without_effect(
            options,
            "resume",
            "while checkpoint is None: did you mean checkpoint='s3://bucket/run1'?",
        )
    resumes, is_tuned = options.resume in (True, "auto"), "max-autotune" in str(options.compile)
    is_drawn, is_whole = options.weights is not None, options.gather and options.accumulate > 1
    exclude = {
        ("overwrite", "resume"): options.overwrite and resumes,
        ("accumulate", "batch_size"): options.accumulate > options.batch_size,
        ("weights", "shuffle"): is_drawn and options.shuffle == "never",
        ("gather", "accumulate"): is_whole,
        ("compile", "deterministic"): is_tuned and options.deterministic,
    }
    for (name, other), is_so in exclude.items():
        if is_so:
            raise OptionsError(
                f"{name} and {other}={getattr(options, other)!r} exclude each other: "
                f"{_WHY[name]}. Leave one of them out."
            )
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
    if num_samples is None and options.workers is not None:
        raise without_effect(
            options, "workers", "on a stream, which every rank walks through alone: leave it out."
        )
    per_epoch = -(-(num_samples or 0) // options.batch_size)
    planned = options.epochs * per_epoch
    if planned and options.max_steps is not None and options.max_steps > planned:
        raise without_effect(
            options,
            "max_steps",
            f"while epochs is {options.epochs}, which are {planned:,} steps: did you mean "
            f"epochs={-(-options.max_steps // per_epoch)}?",
        )
