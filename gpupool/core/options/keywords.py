"""Options as keywords of `train`. Runs anywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypedDict

from gpupool.core.errors import OptionsError, TrainingError
from gpupool.core.options.fields import (
    BatchNorm,
    BnStatistics,
    ClipMethod,
    CompileMode,
    Compress,
    Execution,
    Inputs,
    Keep,
    Normalize,
    OnDivergence,
    OnError,
    OnFailure,
    Optimizer,
    Precision,
    Profile,
    Progress,
    Scale,
    Schedule,
    Shuffle,
    Weight,
    option_parameters,
)
from gpupool.core.options.named_measures import check_loss
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.masking import without_passwords

_MAX_CHARS = 80  # of a value in an error


class TrainingKeywords(TypedDict, total=False):
    """The fields of `TrainingOptions`, for editors and type checkers: see there what each means."""

    optimizer: Optimizer | Callable[..., Any]
    lr: float
    momentum: float | None
    nesterov: bool
    betas: tuple[float, float] | None
    alpha: float | None
    eps: float | None
    trust_coefficient: float | None
    weight_decay: float
    weight_decay_factors: Mapping[str, float]
    learn_rate_factors: Mapping[str, float]
    schedule: Schedule | Sequence[tuple[Schedule, int]] | Callable[[int, int], float]
    drop_factor: float | None
    drop_period: int | None
    drop_patience: int | None
    power: float | None
    min_factor: float | None
    cycle_period: int | None
    warmup: str | int | None
    warmup_factor: float | None
    epochs: int
    max_steps: int | None
    batch_size: int
    scale: Scale
    accumulate: int
    rank_load: Sequence[float] | None
    shuffle: Shuffle
    weights: Sequence[float] | Literal["balanced"] | None
    bucket_by: Sequence[float] | Callable[[int], float] | str | None
    batch_sampler: Iterable[Sequence[int]] | None
    seed: int
    deterministic: bool
    normalize: Normalize
    workers: int | None
    on_error: OnError
    max_skipped: float | None
    collate: Callable[[list[Any]], Any] | None
    inputs: Inputs | Sequence[str | int]
    targets: str | int
    weight: Weight | Callable[[Any], Any] | None
    gather: bool
    step: Callable[[Any, Any, Any], Any] | None
    clip: float | None
    clip_method: ClipMethod | None
    precision: Precision
    compile: bool | CompileMode
    channels_last: bool
    compress: Compress
    batch_norm: BatchNorm
    bn_statistics: BnStatistics
    ema: float | None
    validate_every: Literal["epoch"] | int
    metrics: Sequence[Any] | Mapping[str, Any]
    objective: str
    keep: Keep
    patience: int | None
    min_delta: float
    on_divergence: OnDivergence
    checkpoint: str | None
    checkpoint_every: str | int | None
    num_checkpoints: int
    resume: str | bool
    overwrite: bool
    on_failure: OnFailure
    log_every: int
    progress: Progress
    callbacks: Sequence[Callable[[Any], Any]]
    tensorboard: str | None
    profile: Profile | None
    execution: Execution


def with_keywords(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of `function` with every option by name instead of its last parameter.

    Completion in a notebook reads it: it knows nothing of `TypedDict`.
    """
    signature = inspect.signature(function)
    own = list(signature.parameters.values())[:-1]
    return signature.replace(parameters=[*own, *option_parameters()])


def merged(
    loss: Any, options: TrainingOptions | None, keywords: Mapping[str, Any]
) -> tuple[Any, TrainingOptions]:
    """The loss and the options of a call of `train`: `keywords` replace single fields of `options`.

    Options in the place of the loss, `train(model, dataset, options)`, count as options.

    Raises:
        OptionsError: a name that is no option, a value that is none, or options given twice.
    """
    if isinstance(loss, TrainingOptions):
        if options is not None:
            raise OptionsError(
                "train(...) has TrainingOptions twice, as loss and as options: the loss comes "
                "third, as 'cross_entropy', and options=... after it.",
                "type",
                "loss",
            )
        loss, options = "auto", loss
    if isinstance(loss, Mapping) and _has_options(loss):
        raise OptionsError(
            f"loss={short(loss)} has names of options: write train(model, dataset, "
            f"{_as_keywords(loss)}).",
            "type",
            "loss",
        )
    if options is None:
        return loss, TrainingOptions(**keywords)
    if not isinstance(options, TrainingOptions):
        meant = (
            f"write train(model, dataset, {_as_keywords(options)})"
            if isinstance(options, Mapping) and options
            else "give a gpupool.TrainingOptions(...), or its fields by name, as "
            "train(model, dataset, epochs=1)"
        )
        raise OptionsError(f"options={short(options)}: {meant}.", "type", "options")
    # `replace` makes new options, which are checked as a whole.
    return loss, replace(options, **keywords) if keywords else options


def _has_options(loss: Mapping[Any, Any]) -> bool:
    """Whether a dict in the place of the loss names options, and no outputs of a network."""
    known = {field.name for field in fields(TrainingOptions)}
    if not loss or not known.issuperset(loss):
        return False
    # An output may be called "scale": it has a loss then, which no option takes.
    try:
        check_loss(loss)
    except TrainingError:
        return True
    return False


def _as_keywords(values: Mapping[Any, Any]) -> str:
    return ", ".join(f"{name}={short(value)}" for name, value in values.items())


def short(value: object) -> str:
    """`repr`, cut off where it is long: a network, or a data set, would fill the screen."""
    text = without_passwords(" ".join(repr(value).split()))
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
