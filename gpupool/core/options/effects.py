"""Options that would do nothing, each with what was meant. Runs anywhere.

`check_effects` looks at the options alone, when they are made; `check_for` at what they meet: data,
model and ranks, before any rank starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from gpupool.core.errors import OptionsError
from gpupool.core.options.checks import warmup_of
from gpupool.core.options.fields import TrainingFields
from gpupool.core.options.model_facts import ModelFacts
from gpupool.core.options.named_measures import name_of
from gpupool.core.options.sampling import steps_per_epoch
from gpupool.core.options.schedule import check_for_stream


@dataclass(frozen=True, slots=True)
class Effect:
    """Options that work only while another one has one of the values `needs`.

    `needs` may be a function of the other one's value. `meant` is what to choose for it.
    """

    names: tuple[str, ...]
    other: str
    needs: tuple[Any, ...] | Callable[[Any], bool]
    meant: str

    def works(self, value: Any) -> bool:
        """Whether the other option, with this value, lets them work."""
        return self.needs(value) if callable(self.needs) else value in self.needs


def schedule_names(schedule: Any) -> tuple[str, ...]:
    """The names in a schedule; none of a callable."""
    if isinstance(schedule, str):
        return (schedule,)
    return () if callable(schedule) else tuple(name for name, _ in schedule)


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda schedule: any(name in names for name in schedule_names(schedule))


def _is_given(value: Any) -> bool:
    return value is not None


EFFECTS = (
    Effect(("momentum",), "optimizer", ("sgdm", "sgd", "lars", "rmsprop"), "'sgdm'"),
    Effect(("nesterov",), "optimizer", ("sgdm", "sgd"), "'sgdm'"),
    Effect(("betas",), "optimizer", ("adam", "adamw", "lamb"), "'adam'"),
    Effect(("alpha",), "optimizer", ("rmsprop",), "'rmsprop'"),
    Effect(("eps",), "optimizer", ("adam", "adamw", "rmsprop", "lamb"), "'adam'"),
    Effect(("trust_coefficient",), "optimizer", ("lars",), "'lars'"),
    Effect(("weight_decay_factors",), "weight_decay", lambda decay: decay > 0, "1e-4"),
    Effect(("drop_period",), "schedule", _has("piecewise", "exponential"), "'piecewise'"),
    Effect(("drop_factor",), "schedule", _has("piecewise", "exponential"), "'piecewise'"),
    Effect(("power",), "schedule", _has("polynomial"), "'polynomial'"),
    Effect(("min_factor",), "schedule", _has("polynomial", "cosine", "cyclical"), "'cosine'"),
    Effect(("cycle_period",), "schedule", _has("cosine", "cyclical"), "'cyclical'"),
    Effect(("warmup_factor",), "warmup", _is_given, "'1 epoch'"),
    # A sampler decides all of this itself; linear scaling would change the rate alone.
    Effect(
        ("batch_size", "shuffle", "scale", "weights", "bucket_by"),
        "batch_sampler",
        lambda sampler: sampler is None,
        "None",
    ),
    Effect(
        ("checkpoint_every", "num_checkpoints", "overwrite", "on_failure"),
        "checkpoint",
        _is_given,
        "'s3://bucket/run1'",
    ),
)


def check_effects(options: TrainingFields) -> None:
    """Refuse options that do nothing beside the others."""
    # Only of what was given: a default that does nothing was nobody's wish.
    for effect in EFFECTS:
        other = getattr(options, effect.other)
        for name in effect.names:
            if is_given(options, name) and not effect.works(other):
                raise OptionsError(
                    f"{name}={getattr(options, name)!r} has no effect while {effect.other} is "
                    f"{_shown(other)}: did you mean {effect.other}={effect.meant}?",
                    "no effect",
                    name,
                )
    _check_resume(options)
    _check_nesterov(options)
    _check_drops(options)
    _check_warmup(options)
    _check_objective(options)
    _check_batches(options)
    if options.deterministic and str(options.compile).startswith("max-autotune"):
        raise OptionsError(
            f"deterministic=True and compile={options.compile!r} exclude each other: autotuning "
            "takes the kernels that were fastest, which differ from run to run. Did you mean "
            "compile=True?",
            "conflict",
            "compile",
        )


def _check_resume(options: TrainingFields) -> None:
    # The URL of one checkpoint names its own place, so it needs no folder.
    if options.resume in (True, "auto") and options.checkpoint is None:
        raise OptionsError(
            f"resume={options.resume!r} has no effect while checkpoint is None: did you mean "
            "checkpoint='s3://bucket/run1', the folder to resume from?",
            "no effect",
            "resume",
        )
    if options.overwrite and options.resume in (True, "auto"):
        raise OptionsError(
            f"overwrite=True begins from scratch, and resume={options.resume!r} does not: leave "
            "one of them out.",
            "conflict",
            "overwrite",
            "resume",
        )


def _check_nesterov(options: TrainingFields) -> None:
    usual = 0.0 if options.optimizer == "sgd" else 0.9
    if options.nesterov and not (usual if options.momentum is None else options.momentum):
        raise OptionsError(
            "nesterov=True has no effect without momentum: did you mean momentum=0.9?",
            "no effect",
            "nesterov",
        )


def check_for(
    options: TrainingFields,
    *,
    has_validation: bool,
    num_ranks: int | None = None,
    num_samples: int | None = None,
    is_stream: bool = False,
    model: ModelFacts | None = None,
) -> None:
    """Refuse resolved options that do nothing, or cannot be, with this data, model and these ranks.

    Args:
        is_stream: nobody knows how many samples there are.

    Raises:
        OptionsError: with what was meant.
    """
    if not has_validation:
        for name in ("patience", "objective", "validate_every", "metrics"):
            if is_given(options, name):
                _refuse_without_validation(options, name)
        # Not by `is_given`: keep="last" is what happens without validation, and does no harm.
        if options.keep == "best":
            _refuse_without_validation(options, "keep")
    if options.rank_load is not None and num_ranks not in (None, len(options.rank_load)):
        raise OptionsError(
            f"rank_load={options.rank_load}: has {len(options.rank_load)} shares, and {num_ranks} "
            f"rank{'s train' if num_ranks != 1 else ' trains'}: give one share for each.",
            "length",
            "rank_load",
        )
    if is_stream and options.workers is not None:
        raise OptionsError(
            f"workers={options.workers} does nothing for a stream, which every rank walks through "
            "alone: leave it out.",
            "no effect",
            "workers",
        )
    num_steps = steps_per_epoch(options, num_samples)
    if is_stream or (num_samples and not num_steps):
        check_for_stream(options)
    if num_steps:
        _check_lengths(options, num_steps)
    if model is not None:
        _check_model(options, model)


def is_given(options: Any, name: str) -> bool:
    """Whether an option has another value than the one it has when left out."""
    field = next(field for field in fields(options) if field.name == name)
    # A dataclass does not record what was passed: a default that was typed counts as left out.
    if field.default_factory is not MISSING:
        return bool(getattr(options, name) != field.default_factory())
    return bool(getattr(options, name) != field.default)


def _refuse_without_validation(options: TrainingFields, name: str) -> None:
    raise OptionsError(
        f"{name}={getattr(options, name)!r} has no effect without validation data: did you mean "
        "train(..., validation=...)?",
        "no effect",
        name,
    )


def _check_objective(options: TrainingFields) -> None:
    """A name that no validation has, as far as the names are known here."""
    metrics = options.metrics
    # Outputs and collections name their values only when these are computed.
    if isinstance(metrics, Mapping) or any(hasattr(metric, "compute") for metric in metrics):
        return
    known = list(dict.fromkeys(["loss", "accuracy", *map(name_of, metrics)]))
    if options.objective not in known:
        raise OptionsError(
            f"objective={options.objective!r} is not measured: choose one of {', '.join(known)}, "
            f"or add it: metrics=[{options.objective!r}].",
            "not measured",
            "objective",
        )


def _check_batches(options: TrainingFields) -> None:
    """What does not go together where the user takes part in a step."""
    if options.gather and options.accumulate > 1:
        raise OptionsError(
            "gather=True has the loss of the whole batch at once, and accumulate="
            f"{options.accumulate} computes it in parts: leave one of them out.",
            "conflict",
            "gather",
            "accumulate",
        )


def _check_drops(options: TrainingFields) -> None:
    """A drop that comes after the end."""
    pieces = options.schedule if isinstance(options.schedule, tuple) else ()
    if options.schedule == "piecewise":
        pieces = (("piecewise", options.epochs),)
    for name, epochs in pieces:
        period = options.drop_period or max(1, epochs // 3)
        if name == "piecewise" and period >= epochs:
            raise OptionsError(
                f"schedule='piecewise' has no effect while drop_period is {period} and it lasts "
                f"{_many(epochs, 'epoch')}: the first drop would come after its end.",
                "no effect",
                "schedule",
            )


def _check_warmup(options: TrainingFields) -> None:
    if options.warmup is None:
        return
    number, unit = warmup_of(options.warmup)
    limits = {"epoch": options.epochs, "step": options.max_steps}
    limit = limits[unit]
    # Equal is too long: the step after the warm-up is the first with the full rate.
    if limit is not None and number >= limit:
        _refuse_warmup(options, _many(limit, unit))


def _refuse_warmup(options: TrainingFields, length: str) -> None:
    raise OptionsError(
        f"warmup={options.warmup!r}: the whole training has {length}, so the learning rate would "
        "never be reached; make it shorter.",
        "too long",
        "warmup",
    )


def _check_lengths(options: TrainingFields, steps_per_epoch: int) -> None:
    """What would come after the last step."""
    planned = options.epochs * steps_per_epoch
    steps = planned if options.max_steps is None else min(planned, options.max_steps)
    if options.max_steps is not None and options.max_steps > planned:
        raise OptionsError(
            f"max_steps={options.max_steps} has no effect while epochs is {options.epochs}, which "
            f"are {_many(planned, 'step')}: did you mean "
            f"epochs={-(-options.max_steps // steps_per_epoch)}?",
            "no effect",
            "max_steps",
        )
    if options.warmup is not None:
        number, unit = warmup_of(options.warmup)
        if number * (steps_per_epoch if unit == "epoch" else 1) >= steps:
            _refuse_warmup(options, _many(steps, "step"))
    if options.profile is not None and options.profile.skip >= steps:
        raise OptionsError(
            f"profile.skip={options.profile.skip}: the whole training has "
            f"{_many(steps, 'step')}, so nothing would be traced; make it smaller.",
            "too long",
            "profile",
        )


def _check_model(options: TrainingFields, model: ModelFacts) -> None:
    if is_given(options, "batch_norm") and not model.has_batch_norm:
        raise OptionsError(
            f"batch_norm={options.batch_norm!r} does nothing: the model has no batch norm. Leave "
            "it out.",
            "no effect",
            "batch_norm",
        )
    if options.channels_last and not model.has_convolutions:
        raise OptionsError(
            "channels_last=True does nothing: the model has no convolutions. Leave it out.",
            "no effect",
            "channels_last",
        )
    if options.precision != "float32" and not model.has_float32:
        raise OptionsError(
            f"precision={options.precision!r} does nothing: the model has no float32 parameters. "
            "Give model.float(), or leave it out.",
            "no effect",
            "precision",
        )


def _shown(value: Any) -> str:
    """A value as it is shown: a callable by its name."""
    if not callable(value) and repr(value).startswith("<"):
        return f"a {type(value).__name__}"
    return getattr(value, "__name__", repr(value)) if callable(value) else repr(value)


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
