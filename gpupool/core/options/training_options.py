"""How a network is trained, as one frozen dataclass that is checked when it is made. Runs anywhere.

Fields that are None take the value that their docstring names: so it is known whether one was
given, and one that would have no effect is an error.
"""

from __future__ import annotations

import functools
import inspect
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, get_args

from gpupool.core.errors import OptionsError
from gpupool.core.formatting import shortened
from gpupool.core.options import checks, effects, other_names
from gpupool.core.options.checks import Check, number, word
from gpupool.core.options.option_help import Made, manual, parameters
from gpupool.core.options.pool_options import folder_url, refuse_unknown
from gpupool.core.urls import without_passwords

# The words that options take: for type checkers, for help and completion, and for the checks.
Optimizer: TypeAlias = Literal["sgdm", "adam", "adamw", "rmsprop"]
Schedule: TypeAlias = Literal["none", "piecewise", "cosine", "linear"]
Scale: TypeAlias = Literal["none", "linear"]
Shuffle: TypeAlias = Literal["every-epoch", "once", "never"]
Normalize: TypeAlias = Literal["none", "fit"]
OnError: TypeAlias = Literal["raise", "skip"]
Inputs: TypeAlias = Literal["auto", "one", "args", "kwargs"]
Weight: TypeAlias = Literal["samples", "tokens"]
Precision: TypeAlias = Literal["float32", "bf16", "fp16"]
CompileMode: TypeAlias = Literal[
    "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
BatchNorm: TypeAlias = Literal["local", "sync", "frozen"]
Keep: TypeAlias = Literal["auto", "best", "last"]
OnFailure: TypeAlias = Literal["raise", "resume"]
Progress: TypeAlias = Literal["auto", "plot", "table", "none"]

MAX_SKIPPED = 0.001  # of the samples of an epoch
_MAX_CHARS = 80  # of a value among others


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Steps of which every rank leaves a trace, for Perfetto or TensorBoard."""

    url: str
    """Folder, local or in a store; each rank writes a file of its own there."""
    skip: int = 10
    """Steps before the trace begins, so that the slow first ones are not in it."""
    steps: int = 5
    """Steps in the trace."""

    def __post_init__(self) -> None:
        for name, check in _PROFILE.items():
            # The dataclass is frozen: this is the only way to store a checked value.
            object.__setattr__(self, name, check(f"profile.{name}", getattr(self, name)))


_PROFILE: Mapping[str, Check] = {
    "url": folder_url,
    "skip": number(whole=True, least=0),
    "steps": number(whole=True, least=1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOptions:
    """How a network is trained.

    `batch_size` is global: the samples of one optimizer step over all ranks. Each rank computes its
    share, and the result is that of one process with the whole batch.
    """

    # ---- the optimizer
    optimizer: Optimizer | Callable[..., Any] = "sgdm"
    """"sgdm" (SGD with momentum), "adam", "adamw", "rmsprop" as in `torch.optim`, or a callable:
    parameter groups -> `torch.optim.Optimizer`, as `torch.optim.Adamax` or
    `functools.partial(torch.optim.Adam, lr=0.001, betas=(0.8, 0.99))`, whose lr is that of `lr`."""
    lr: float = 0.01
    """Learning rate."""
    momentum: float | None = None
    """Momentum of "sgdm" (0.9 unless given; 0 is plain SGD) and of "rmsprop" (0)."""
    weight_decay: float = 0.0
    """L2 factor; decoupled for "adamw", added to the gradient otherwise."""
    weight_decay_factors: Mapping[str, float] = field(default_factory=dict)
    """Glob on parameter names -> factor on `weight_decay`. The last matching pattern counts."""
    learn_rate_factors: Mapping[str, float] = field(default_factory=dict)
    """Glob on parameter names -> factor on `lr`; 0 freezes. The last matching pattern counts."""

    # ---- the learning rate over time
    schedule: Schedule | Callable[[int], float] = "none"
    """"none", "piecewise" (times `drop_factor` every `drop_period` epochs), "cosine" and "linear"
    (down to `min_factor` at the end), or a callable: step, from 1 -> factor on `lr`."""
    drop_factor: float | None = None
    """Factor of a drop in "piecewise"; 0.1 unless given."""
    drop_period: int | None = None
    """Epochs between two drops of "piecewise"; a third of all unless given."""
    min_factor: float | None = None
    """Lowest factor on `lr` of "cosine" and "linear"; 0 unless given."""
    warmup: str | int | None = None
    """"1 epoch", "500 steps" or a number of steps in which the learning rate rises in a straight
    line from a tenth; the schedule begins after it ("piecewise": with the first epoch)."""

    # ---- how long, and on what
    epochs: int = 10
    """Passes over the data."""
    max_steps: int | None = None
    """Ends training after so many optimizer steps, should the epochs have more."""
    batch_size: int = 128
    """Samples per optimizer step over all ranks; the last batch of an epoch may be smaller."""
    scale: Scale = "none"
    """"linear" takes `batch_size` and `lr` times the number of ranks that train (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, section 2.1), "none" as they are."""
    accumulate: int = 1
    """Parts in which each batch is computed, one after the other, for less memory; the step is the
    same, but for batch norms, which have the statistics of each part."""
    shuffle: Shuffle = "every-epoch"
    """"every-epoch", "once" (the same order each epoch) or "never"."""
    weights: Sequence[float] | Literal["balanced"] | None = None
    """How often each sample is drawn, relative to the others: an epoch draws as many samples as the
    data set has, with replacement (torch's WeightedRandomSampler). "balanced": each class as often
    as any other, where the data set knows its labels."""
    seed: int = 0
    """Fixes the order of the samples and the random numbers of each rank and step."""
    deterministic: bool = False
    """Two trainings from one `seed`, on as many GPUs of one kind, are equal to the last bit, which
    takes longer; what torch cannot compute so is an error. On CPUs they always are."""
    normalize: Normalize = "none"
    """"fit" takes the mean of each channel of the training inputs away and divides by the standard
    deviation; one pass over the data, by all ranks, before training."""
    workers: int | None = None
    """Processes that read a data set of one's own on each rank, as `num_workers` of torch's
    DataLoader: with 0 the training reads itself. Unless given, the first batch is measured: as many
    as the rank has cores, up to eight times as many where samples wait, none for little data.
    Datastores have threads of their own."""
    on_error: OnError = "raise"
    """What happens when a sample cannot be read: "raise" ends training with an error that names it;
    "skip" leaves it out, counts it nowhere and lists it in `TrainingResult.skipped`; more than
    one in 1,000 of an epoch is an error after all (of one image all patches may be left out). A
    data set of one's own raises `gpupool.SampleError` for such a sample."""

    # ---- what a batch is, and what the network and the loss get of it
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples, as `collate_fn` of torch's DataLoader; each rank calls it
    with its own samples. torch's `default_collate` unless given. It makes the batches of validation
    too: one that mixes samples has a parameter `training=True`, which is False there."""
    inputs: Inputs | Sequence[str | int] = "auto"
    """What of a batch the network is called with: "one" (`model(inputs)`), "args"
    (`model(*inputs)`), "kwargs" (`model(**inputs)`), or names or numbers of parts of the batch.
    "auto": of a pair its first half; of named columns those that `forward` takes by name."""
    targets: str | int = "auto"
    """What the loss is given beside the outputs: a name or number of a part of the batch, or
    "batch", all of it. "auto": the second half of a pair, or the column "label", "labels",
    "target" or "targets"; a function whose second argument is called `batch` gets all."""
    weight: Weight | Callable[[Any], Any] | None = None
    """Over what the loss is a mean: "samples", "tokens" (labels that are not -100), or a function
    of what the loss is given, which counts. So ranks with shares of different length equal one.
    Unless given: what a loss of ours or of torch counts itself; samples of any other."""
    gather: bool = False
    """The loss gets the outputs and targets of all ranks, as a loss over pairs of the batch
    needs (contrastive ones, say); each is then what one rank would compute."""

    # ---- how a step is computed
    clip: float | None = None
    """Limit on the norm of the gradient of the whole batch; None: no limit."""
    precision: Precision = "float32"
    """"float32", "bf16" or "fp16": mixed by `torch.autocast`; "fp16" scales the loss."""
    compile: bool | CompileMode = False
    """`torch.compile`: True, or one of its modes."""
    channels_last: bool = False
    """Convolutions work on channels-last tensors, which is faster on GPUs."""
    batch_norm: BatchNorm = "local"
    """"local" (statistics of a rank's own share), "sync" (of the whole batch) or "frozen" (the
    running ones are used, and stay)."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights; it is what is validated and kept."""

    # ---- validation, and when to stop
    validate_every: Literal["epoch"] | int = "epoch"
    """"epoch" or a number of steps."""
    metrics: Sequence[Any] | Mapping[str, Any] = ()
    """What validations measure beside the loss: names ("accuracy", "f1", "mean_iou" ...), functions
    (outputs, targets) -> mean, or torchmetrics objects; or a dict {output: one or several}."""
    objective: str = "loss"
    """What is best: "loss", "accuracy" or the name of one of `metrics`, of validations."""
    keep: Keep = "auto"
    """Which weights the result has: "best" by `objective`, "last", or "auto": the best where there
    is a validation. A loss that is NaN or infinite ends training with the last that were good."""
    patience: int | None = None
    """Ends training when so many validations in a row were no better than the best before."""

    # ---- checkpoints
    checkpoint: str | None = None
    """Folder for checkpoints, local or in a store ("s3://bucket/run1")."""
    checkpoint_every: str | int | None = None
    """"epoch" (unless given), a number of steps, or a time such as "10m"."""
    num_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    resume: str | bool = False
    """"auto" resumes from the newest checkpoint in `checkpoint`, if there is one; True, if there is
    none, is an error; the URL of one checkpoint resumes from that; False starts at step 0."""
    overwrite: bool = False
    """Begins from scratch although `checkpoint` holds checkpoints of another training: these are
    removed when the first new one is complete, and nothing else is."""
    on_failure: OnFailure = "raise"
    """When a rank dies: "raise", or "resume": it is replaced, and training resumes from the newest
    checkpoint."""

    # ---- what is shown
    progress: Progress = "auto"
    """Shown in the notebook: "plot", "table", "none"; "auto": a plot where there can be one."""
    callbacks: Sequence[Callable[[Any], Any]] = ()
    """Called on every rank with a `CallbackInfo` at "start", "step", "epoch", "validation",
    "checkpoint" and "end"; True from one ends training on all ranks."""
    tensorboard: str | None = None
    """Folder for TensorBoard's event files, local or in a store."""
    profile: Profile | None = None
    """Steps of which every rank leaves a trace."""

    # A type checker would take what it accepts, any name, for what the class accepts.
    if not TYPE_CHECKING:
        # Not in `__init__`, which the dataclass writes. pickle and copy call this without values.
        def __new__(cls, *args: Any, **values: Any) -> TrainingOptions:
            """Refuse names that are no option with a better word than Python's TypeError."""
            if args:
                raise OptionsError(
                    f"TrainingOptions({args[0]!r}, ...): options are given by name, as "
                    "TrainingOptions(optimizer='sgdm', lr=0.01)."
                )
            refuse_unknown(
                values,
                list(cls.__dataclass_fields__),
                other_names.NAMES,
                "`gpupool.TrainingOptions?` explains them all.",
            )
            # Not `super()`: slots=True makes a second class, and `super()` would mean the first.
            return object.__new__(cls)

    def __post_init__(self) -> None:
        self._take_lr_of_optimizer()
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None or one.default is not None:
                # The dataclass is frozen, and not finished yet.
                object.__setattr__(self, one.name, _CHECKS[one.name](one.name, value))
        effects.check_effects(self)

    def _take_lr_of_optimizer(self) -> None:
        """Make the lr of a partial the option `lr`: the schedule sets the rate of each step."""
        make = self.optimizer
        if not isinstance(make, functools.partial) or "lr" not in make.keywords:
            return
        settings = dict(make.keywords)
        lr = settings.pop("lr")
        if self.lr not in (lr, TrainingOptions.__dataclass_fields__["lr"].default):
            raise OptionsError(f"lr={self.lr} and the optimizer's lr={lr} differ: leave one out.")
        object.__setattr__(self, "lr", lr)
        object.__setattr__(self, "optimizer", functools.partial(make.func, *make.args, **settings))

    def __repr__(self) -> str:
        values = (f"{one.name}={_written(getattr(self, one.name))}" for one in fields(self))
        return f"{type(self).__name__}({', '.join(values)})"

    def resolve(self, world_size: int) -> Self:
        """Return the options with scale="linear" applied for `world_size` ranks that train.

        `batch_size` and `lr` are multiplied by `world_size`. Resolved options resolve to
        themselves.
        """
        if self.scale == "none":
            return self
        size, lr = self.batch_size * world_size, self.lr * world_size
        return replace(self, batch_size=size, lr=lr, scale="none")

    def most_skipped(self, num_samples: int) -> int:
        """How many of `num_samples` may be left out in an epoch; those of one image always may."""
        return max(1, int(MAX_SKIPPED * num_samples)) if self.on_error == "skip" else 0


_CHECKS: Mapping[str, Check] = {
    "optimizer": checks.optimizer(*get_args(Optimizer)),
    "lr": number(above=0),
    "momentum": number(least=0, below=1),
    "weight_decay": number(least=0),
    "weight_decay_factors": checks.factors,
    "learn_rate_factors": checks.factors,
    "schedule": checks.function("step", "lambda step: 1 / step", *get_args(Schedule)),
    "drop_factor": number(above=0, below=1),
    "drop_period": number(whole=True, least=1),
    "min_factor": number(least=0, below=1),
    "warmup": checks.warmup,
    "epochs": number(whole=True, least=1),
    "max_steps": number(whole=True, least=1),
    "batch_size": number(whole=True, least=1),
    "scale": word(*get_args(Scale)),
    "accumulate": number(whole=True, least=1),
    "shuffle": word(*get_args(Shuffle)),
    "weights": checks.sample_weights,
    # what torch takes
    "seed": number(whole=True, least=0, most=2**64 - 1),
    "deterministic": checks.flag,
    "normalize": word(*get_args(Normalize)),
    "workers": number(whole=True, least=0, most=512),  # more is a slip of the pen
    "on_error": word(*get_args(OnError)),
    "collate": checks.any_function,
    "inputs": checks.inputs(*get_args(Inputs)),
    "targets": checks.part,
    "weight": checks.function("what the loss is given", "lambda targets: ...", *get_args(Weight)),
    "gather": checks.flag,
    "clip": number(above=0),
    "precision": word(*get_args(Precision)),
    "compile": checks.flag_or(*get_args(CompileMode)),
    "channels_last": checks.flag,
    "batch_norm": word(*get_args(BatchNorm)),
    "ema": number(above=0, below=1),
    "validate_every": checks.interval(),
    "metrics": checks.metrics,
    "objective": checks.instance(str, "the name of a metric"),
    "keep": word(*get_args(Keep)),
    "patience": number(whole=True, least=1),
    "checkpoint": folder_url,
    "checkpoint_every": checks.interval(or_time=True),
    "num_checkpoints": number(whole=True, least=1),
    "resume": checks.resume,
    "overwrite": checks.flag,
    "on_failure": word(*get_args(OnFailure)),
    "progress": word(*get_args(Progress)),
    "callbacks": checks.callbacks,
    "tensorboard": folder_url,
    "profile": checks.instance(Profile, "gpupool.Profile(url='s3://bucket/traces')"),
}


def changed(options: TrainingOptions) -> dict[str, str]:
    """The options that differ from the defaults, each as it would be written, in short."""
    return {
        one.name: written(options, one.name)
        for one in fields(options)
        if effects.is_given(options, one.name)
    }


def written(options: TrainingOptions, name: str) -> str:
    """The value of an option as it would be written, in short."""
    return shortened(_written(getattr(options, name)), _MAX_CHARS)


def _written(value: Any) -> str:
    """As it would be written; functions and objects by their names, and without passwords."""
    if isinstance(value, tuple):
        comma = "," if len(value) == 1 else ""  # without it ('f1') would be text
        return f"({', '.join(map(_written, value))}{comma})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {_written(part)}' for name, part in value.items())}}}"
    if isinstance(value, array):  # of a number for each sample: too many to be shown
        return f"<{len(value):,} numbers>"
    if value is None or isinstance(value, (str, int, float, bool, Profile)):
        return without_passwords(repr(value))
    # Not the repr of an object, which may be long, or hold what nobody should read.
    name: str = getattr(value, "__qualname__", None) or type(value).__qualname__
    return name.rpartition("<locals>.")[2]  # not the function that has made it


_HEAD = inspect.cleandoc(TrainingOptions.__doc__ or "")
# After the dataclass was made, which writes a docstring and a signature of its own.
TrainingOptions.__doc__ = Made(lambda: manual(TrainingOptions, _HEAD))  # type: ignore[assignment]
TrainingOptions.__signature__ = Made(  # type: ignore[attr-defined]
    lambda: inspect.Signature(parameters(TrainingOptions))
)
