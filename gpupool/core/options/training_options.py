"""How a network is trained, as one frozen dataclass that is checked when it is made. Runs anywhere.

Fields that are None take the value that their docstring names: so it is known whether one was
given, and one that would have no effect is an error.
"""

from __future__ import annotations

import functools
import inspect
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from gpupool.core.errors import OptionsError
from gpupool.core.formatting import shortened
from gpupool.core.options import checks, effects, other_names
from gpupool.core.options.checks import Check, number, word
from gpupool.core.options.effects import Needs
from gpupool.core.options.option_help import Made, manual, parameters
from gpupool.core.options.pool_options import folder_url, refuse_unknown
from gpupool.core.urls import without_passwords

# The words that options take: for type checkers, for help and completion, and for the checks.
Optimizer: TypeAlias = Literal["sgdm", "adam", "adamw", "rmsprop"]
Schedule: TypeAlias = Literal["none", "piecewise", "cosine", "linear"]
Shuffle: TypeAlias = Literal["every-epoch", "once", "never"]
Normalize: TypeAlias = Literal["none", "fit"]
OnError: TypeAlias = Literal["raise", "skip"]
Weight: TypeAlias = Literal["samples", "tokens"]
Precision: TypeAlias = Literal["float32", "bf16", "fp16"]
CompileMode: TypeAlias = Literal[
    "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
BatchNorm: TypeAlias = Literal["local", "sync", "frozen"]
Keep: TypeAlias = Literal["auto", "best", "last"]
OnFailure: TypeAlias = Literal["raise", "resume"]
Progress: TypeAlias = Literal["auto", "plot", "table", "none"]

_ADAM = "lambda groups: torch.optim.Adam(groups, amsgrad=True)"
MAX_SKIPPED = 0.001  # of the samples of an epoch
_MAX_CHARS = 80  # of a value among others

# What some options need to have an effect.
_MOMENTUM = Needs("optimizer", ("sgdm", "rmsprop"), "'sgdm'")
_DECAY = Needs("weight_decay", (), "1e-4")
_PIECEWISE = Needs("schedule", ("piecewise",), "'piecewise'")
_CURVE = Needs("schedule", ("cosine", "linear"), "'cosine'")
_FOLDER = Needs("checkpoint", (), "'s3://bucket/run1'")


def option(default: Any, check: Check, needs: Needs | None = None) -> Any:
    """An option: what it is unless given, the values it takes, and what it needs to do anything."""
    about = {"check": check, "needs": needs}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Steps of which every rank leaves a trace, for Perfetto or TensorBoard."""

    url: str
    """Folder, local or in a store; each rank writes a file of its own there."""
    skip: int = option(10, number(whole=True, least=0))
    """Steps before the trace begins, so that the slow first ones are not in it."""
    steps: int = option(5, number(whole=True, least=1))
    """Steps in the trace."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", folder_url("profile.url", self.url))
        _check(self, "profile.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOptions:
    """How a network is trained.

    `batch_size` is global: the samples of one optimizer step over all ranks. Each rank computes its
    share, and the result is that of one process with the whole batch.
    """

    # ---- the optimizer
    optimizer: Optimizer | Callable[..., Any] = option(
        "sgdm", checks.function("parameter groups", _ADAM, Optimizer)
    )
    """"sgdm" (SGD with momentum), "adam", "adamw", "rmsprop" as in `torch.optim`, or a callable:
    parameter groups -> `torch.optim.Optimizer`, as `torch.optim.Adamax` or
    `functools.partial(torch.optim.Adam, lr=0.001, betas=(0.8, 0.99))`, whose lr is that of `lr`."""
    lr: float = option(0.01, number(above=0))
    """Learning rate."""
    momentum: float | None = option(None, number(least=0, below=1), needs=_MOMENTUM)
    """Momentum of "sgdm" (0.9 unless given; 0 is plain SGD) and of "rmsprop" (0)."""
    weight_decay: float = option(0.0, number(least=0))
    """L2 factor; decoupled for "adamw", added to the gradient otherwise."""
    weight_decay_factors: Mapping[str, float] = option({}, checks.factors, needs=_DECAY)
    """Glob on parameter names -> factor on `weight_decay`. The last matching pattern counts."""
    learn_rate_factors: Mapping[str, float] = option({}, checks.factors)
    """Glob on parameter names -> factor on `lr`; 0 freezes. The last matching pattern counts."""

    # ---- the learning rate over time
    schedule: Schedule | Callable[[int], float] = option(
        "none", checks.function("step", "lambda step: 1 / step", Schedule)
    )
    """"none", "piecewise" (times `drop_factor` every `drop_period` epochs), "cosine" and "linear"
    (down to `min_factor` at the end), or a callable: step, from 1 -> factor on `lr`."""
    drop_factor: float | None = option(None, number(above=0, below=1), needs=_PIECEWISE)
    """Factor of a drop in "piecewise"; 0.1 unless given."""
    drop_period: int | None = option(None, number(whole=True, least=1), needs=_PIECEWISE)
    """Epochs between two drops of "piecewise"; a third of all unless given."""
    min_factor: float | None = option(None, number(least=0, below=1), needs=_CURVE)
    """Lowest factor on `lr` of "cosine" and "linear"; 0 unless given."""
    warmup: str | int | None = option(None, checks.warmup)
    """"1 epoch", "500 steps" or a number of steps in which the learning rate rises in a straight
    line from a tenth; the schedule begins after it ("piecewise": with the first epoch)."""

    # ---- how long, and on what
    epochs: int = option(10, number(whole=True, least=1))
    """Passes over the data."""
    max_steps: int | None = option(None, number(whole=True, least=1))
    """Ends training after so many optimizer steps, should the epochs have more."""
    batch_size: int = option(128, number(whole=True, least=1))
    """Samples per optimizer step over all ranks; the last batch of an epoch may be smaller."""
    accumulate: int = option(1, number(whole=True, least=1))
    """Parts in which each batch is computed, one after the other, for less memory; the step is the
    same, but for batch norms, which have the statistics of each part."""
    shuffle: Shuffle = option("every-epoch", word(Shuffle))
    """"every-epoch", "once" (the same order each epoch) or "never"."""
    weights: Sequence[float] | Literal["balanced"] | None = option(None, checks.sample_weights)
    """How often each sample is drawn, relative to the others: an epoch draws as many samples as the
    data set has, with replacement (torch's WeightedRandomSampler). "balanced": each class as often
    as any other, where the data set knows its labels."""
    seed: int = option(0, number(whole=True, least=0, most=2**64 - 1))  # what torch takes
    """Fixes the order of the samples and the random numbers of each rank and step."""
    deterministic: bool = option(False, checks.flag)
    """Two trainings from one `seed`, on as many GPUs of one kind, are equal to the last bit, which
    takes longer; what torch cannot compute so is an error. On CPUs they always are."""
    normalize: Normalize = option("none", word(Normalize))
    """"fit" takes the mean of each channel of the training inputs away and divides by the standard
    deviation; one pass over the data, by all ranks, before training."""
    workers: int | None = option(None, number(whole=True, least=0, most=512))  # more is a slip
    """Processes that read a data set of one's own on each rank, as `num_workers` of torch's
    DataLoader: with 0 the training reads itself. Unless given, the first batch is measured: as many
    as the rank has cores, up to eight times as many where samples wait, none for little data.
    Datastores have threads of their own."""
    on_error: OnError = option("raise", word(OnError))
    """What happens when a sample cannot be read: "raise" ends training with an error that names it;
    "skip" leaves it out, counts it nowhere and lists it in `TrainingResult.skipped`; more than
    one in 1,000 of an epoch is an error after all (of one image all patches may be left out). A
    data set of one's own raises `gpupool.SampleError` for such a sample."""

    # ---- what a batch is, and what the network and the loss get of it
    collate: Callable[[list[Any]], Any] | None = option(None, checks.any_function)
    """Makes a batch of a list of samples, as `collate_fn` of torch's DataLoader; each rank calls it
    with its own samples. torch's `default_collate` unless given. It makes the batches of validation
    too: one that mixes samples has a parameter `training=True`, which is False there."""
    inputs: Literal["auto"] | Sequence[str | int] = option("auto", checks.inputs)
    """What of a batch the network is called with: names or numbers of parts of the batch.
    "auto": of a pair its first half; of named columns those that `forward` takes by name."""
    targets: str | int = option("auto", checks.part)
    """What the loss is given beside the outputs: a name or number of a part of the batch, or
    "batch", all of it. "auto": the second half of a pair, or the column "label", "labels",
    "target" or "targets"; a function whose second argument is called `batch` gets all."""
    weight: Weight | Callable[[Any], Any] | None = option(
        None, checks.function("what the loss is given", "lambda targets: ...", Weight)
    )
    """Over what the loss is a mean: "samples", "tokens" (labels that are not -100), or a function
    of what the loss is given, which counts. So ranks with shares of different length equal one.
    Unless given: what a loss of ours or of torch counts itself; samples of any other."""
    gather: bool = option(False, checks.flag)
    """The loss gets the outputs and targets of all ranks, as a loss over pairs of the batch
    needs (contrastive ones, say); each is then what one rank would compute."""

    # ---- how a step is computed
    clip: float | None = option(None, number(above=0))
    """Limit on the norm of the gradient of the whole batch; None: no limit."""
    precision: Precision = option("float32", word(Precision))
    """"float32", "bf16" or "fp16": mixed by `torch.autocast`; "fp16" scales the loss."""
    compile: bool | CompileMode = option(False, checks.flag_or(CompileMode))
    """`torch.compile`: True, or one of its modes."""
    channels_last: bool = option(False, checks.flag)
    """Convolutions work on channels-last tensors, which is faster on GPUs."""
    batch_norm: BatchNorm = option("local", word(BatchNorm))
    """"local" (statistics of a rank's own share), "sync" (of the whole batch) or "frozen" (the
    running ones are used, and stay)."""
    ema: float | None = option(None, number(above=0, below=1))
    """Decay of an exponential moving average of the weights; it is what is validated and kept."""

    # ---- validation, and when to stop
    validate_every: Literal["epoch"] | int = option("epoch", checks.interval())
    """"epoch" or a number of steps."""
    metrics: Sequence[Any] | Mapping[str, Any] = option((), checks.metrics)
    """What validations measure beside the loss: names ("accuracy", "f1", "mean_iou" ...), functions
    (outputs, targets) -> mean, or torchmetrics objects; or a dict {output: one or several}."""
    objective: str = option("loss", checks.instance(str, "the name of a metric"))
    """What is best: "loss", "accuracy" or the name of one of `metrics`, of validations."""
    keep: Keep = option("auto", word(Keep))
    """Which weights the result has: "best" by `objective`, "last", or "auto": the best where there
    is a validation. A loss that is NaN or infinite ends training with the last that were good."""
    patience: int | None = option(None, number(whole=True, least=1))
    """Ends training when so many validations in a row were no better than the best before."""

    # ---- checkpoints
    checkpoint: str | None = option(None, folder_url)
    """Folder for checkpoints, local or in a store ("s3://bucket/run1")."""
    checkpoint_every: str | int | None = option(None, checks.interval(or_time=True), needs=_FOLDER)
    """"epoch" (unless given), a number of steps, or a time such as "10m"."""
    num_checkpoints: int = option(2, number(whole=True, least=1), needs=_FOLDER)
    """Newest checkpoints that are kept."""
    resume: str | bool = option(False, checks.resume)
    """"auto" resumes from the newest checkpoint in `checkpoint`, if there is one; True, if there is
    none, is an error; the URL of one checkpoint resumes from that; False starts at step 0."""
    overwrite: bool = option(False, checks.flag, needs=_FOLDER)
    """Begins from scratch although `checkpoint` holds checkpoints of another training: these are
    removed when the first new one is complete, and nothing else is."""
    on_failure: OnFailure = option("raise", word(OnFailure), needs=_FOLDER)
    """When a rank dies: "raise", or "resume": it is replaced, and training resumes from the newest
    checkpoint."""

    # ---- what is shown
    progress: Progress = option("auto", word(Progress))
    """Shown in the notebook: "plot", "table", "none"; "auto": a plot where there can be one."""
    callbacks: Sequence[Callable[[Any], Any]] = option((), checks.callbacks)
    """Called on every rank with a `CallbackInfo` at "start", "step", "epoch", "validation",
    "checkpoint" and "end"; True from one ends training on all ranks."""
    tensorboard: str | None = option(None, folder_url)
    """Folder for TensorBoard's event files, local or in a store."""
    profile: Profile | None = option(
        None, checks.instance(Profile, "gpupool.Profile(url='s3://bucket/traces')")
    )
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
        _check(self)
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

    def most_skipped(self, num_samples: int) -> int:
        """How many of `num_samples` may be left out in an epoch; those of one image always may."""
        return max(1, int(MAX_SKIPPED * num_samples)) if self.on_error == "skip" else 0


def _check(options: Any, where: str = "") -> None:
    """Refuse wrong values; keep each as its check gives it."""
    for one in fields(options):
        value = getattr(options, one.name)
        if "check" in one.metadata and (value is not None or one.default is not None):
            # The dataclass is frozen, and not finished yet.
            object.__setattr__(options, one.name, one.metadata["check"](where + one.name, value))


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
