"""What can be chosen of a training: names, defaults, and what each means. Runs anywhere.

Fields that are None take the value that their docstring names: so it is known whether one was
given, and one that would have no effect is an error. `TrainingOptions` checks them.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from gpupool.core.errors import OptionsError
from gpupool.core.options.pool_options import folder_url, number, parameters

MAX_SKIPPED = 0.001  # of the samples of an epoch

# The words that options take: for type checkers, for help and completion, and for the checks.
Optimizer: TypeAlias = Literal["sgdm", "sgd", "adam", "adamw", "rmsprop", "lbfgs", "lars", "lamb"]
Schedule: TypeAlias = Literal[
    "none", "piecewise", "exponential", "polynomial", "cosine", "cyclical", "plateau"
]
Scale: TypeAlias = Literal["none", "linear"]
Shuffle: TypeAlias = Literal["every-epoch", "once", "never"]
Normalize: TypeAlias = Literal["none", "fit"]
OnError: TypeAlias = Literal["raise", "skip"]
Inputs: TypeAlias = Literal["auto", "one", "args", "kwargs"]
Weight: TypeAlias = Literal["samples", "tokens"]
ClipMethod: TypeAlias = Literal["global-l2norm", "l2norm", "absolute-value"]
Precision: TypeAlias = Literal["float32", "bf16", "fp16"]
CompileMode: TypeAlias = Literal[
    "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
Compress: TypeAlias = Literal["none", "bf16", "fp16"]
BatchNorm: TypeAlias = Literal["local", "sync", "frozen"]
BnStatistics: TypeAlias = Literal["moving", "population"]
Keep: TypeAlias = Literal["auto", "best", "last"]
OnDivergence: TypeAlias = Literal["stop", "tell"]
OnFailure: TypeAlias = Literal["raise", "resume"]
Progress: TypeAlias = Literal["auto", "plot", "table", "none"]
Execution: TypeAlias = Literal[
    "auto", "cpu", "gpu", "multi-gpu", "parallel-auto", "parallel-cpu", "parallel-gpu"
]


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
        # The dataclass is frozen: this is the only way to store a checked value.
        object.__setattr__(self, "url", folder_url("profile.url", self.url))
        for name, least in (("skip", 0), ("steps", 1)):
            value = getattr(self, name)
            number(f"profile.{name}", value, whole=True)
            if value < least:
                raise OptionsError(
                    f"profile.{name}={value}: must be at least {least}.", "range", "profile"
                )
            object.__setattr__(self, name, int(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFields:
    """The options of a training, not yet checked: see `TrainingOptions`."""

    # ---- the optimizer
    optimizer: Optimizer | Callable[..., Any] = "sgdm"
    """"sgdm" (SGD with momentum), "sgd", "adam", "adamw", "rmsprop", "lbfgs" as in `torch.optim`,
    "lars" (You et al. 2017), "lamb" (You et al. 2020), or a callable: parameter groups ->
    `torch.optim.Optimizer`, as `lambda groups: torch.optim.Adamax(groups, lr=0.01)`."""
    lr: float = 0.01
    """Learning rate."""
    momentum: float | None = None
    """Momentum of "sgdm" and "lars" (0.9 unless given), and of "sgd" and "rmsprop" (0)."""
    nesterov: bool = False
    """Nesterov's form of the momentum of "sgdm" and "sgd", as in `torch.optim.SGD`."""
    betas: tuple[float, float] | None = None
    """Decay of the averages of gradient and squared gradient of "adam", "adamw" and "lamb";
    (0.9, 0.999) unless given."""
    alpha: float | None = None
    """Decay of "rmsprop"'s average of the squared gradient; 0.99 unless given."""
    eps: float | None = None
    """What "adam", "adamw" and "rmsprop" (1e-8 unless given) and "lamb" (1e-6) add to the
    denominator."""
    trust_coefficient: float | None = None
    """Norm of a layer's step in "lars" over norm of its weights, at lr 1; 0.001 unless given."""
    weight_decay: float = 0.0
    """L2 factor; decoupled for "adamw" and "lamb", added to the gradient otherwise."""
    weight_decay_factors: Mapping[str, float] = field(default_factory=dict)
    """Glob on parameter names -> factor on `weight_decay`. The last matching pattern counts."""
    learn_rate_factors: Mapping[str, float] = field(default_factory=dict)
    """Glob on parameter names -> factor on `lr`; 0 freezes. The last matching pattern counts."""

    # ---- the learning rate over time
    schedule: Schedule | Sequence[tuple[Schedule, int]] | Callable[[int, int], float] = "none"
    """"none", "piecewise" (times `drop_factor` every `drop_period` epochs), "exponential" (the same
    in small parts each step); "polynomial" and "cosine" (down to `min_factor` at the end),
    "cyclical" (a triangle between `min_factor` and 1). "plateau" drops by `drop_factor` when
    validation no longer improves, as torch's `ReduceLROnPlateau` does. Or a sequence of (name,
    epochs), one after the other; or a callable: (step, epoch), both from 1 -> factor on `lr`."""
    drop_factor: float | None = None
    """Factor of a drop in "piecewise", "exponential" and "plateau"; 0.1 unless given."""
    drop_period: int | None = None
    """Epochs between two drops of "piecewise" and "exponential"; a third of all unless given."""
    drop_patience: int | None = None
    """Validations in a row, no better than the best before, that "plateau" bears; the rate drops
    after one more. 10 unless given."""
    power: float | None = None
    """Exponent of "polynomial"; 1 unless given, a straight line."""
    min_factor: float | None = None
    """Lowest factor on `lr` of "polynomial", "cosine" and "plateau" (0 unless given) and "cyclical"
    (0.1)."""
    cycle_period: int | None = None
    """Epochs of one cycle: of "cyclical" (2 unless given), and of "cosine", which starts again with
    each (one over the whole training unless given)."""
    warmup: str | int | None = None
    """"1 epoch", "500 steps" or a number of steps in which the learning rate rises in a straight
    line from `warmup_factor` to 1; the schedule begins after it ("piecewise": with the first
    epoch)."""
    warmup_factor: float | None = None
    """Factor on `lr` in the first step of the warm-up; unless given 0.1, or what gives the unscaled
    learning rate where scale="linear" has scaled it."""

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
    rank_load: Sequence[float] | None = None
    """Share of each rank in a batch, relative to the others; 0: that rank has none. Equal unless
    given."""
    shuffle: Shuffle = "every-epoch"
    """"every-epoch", "once" (the same order each epoch) or "never"."""
    weights: Sequence[float] | Literal["balanced"] | None = None
    """How often each sample is drawn, relative to the others: an epoch draws as many samples as the
    data set has, with replacement (torch's WeightedRandomSampler). "balanced": each class as often
    as any other, where the data set knows its labels."""
    bucket_by: Sequence[float] | Callable[[int], float] | str | None = None
    """Makes batches of samples of similar length, other ones each epoch: the length of each sample,
    a function of the index, or a column of a Hugging Face data set. Its values are lengths,
    or have them. Each sample comes once an epoch."""
    batch_sampler: Iterable[Sequence[int]] | None = None
    """Gives the batches of an epoch as lists of indices, over all ranks: a list, a BatchSampler of
    torch, or an object of one's own, the same on every rank. `set_epoch(epoch)` is called if it
    has that."""
    seed: int = 0
    """Fixes the order of the samples and the random numbers of each rank and step."""
    deterministic: bool = False
    """Two trainings from one `seed`, on as many GPUs of one kind, are equal to the last bit, which
    takes longer; what torch cannot compute so is an error. On CPUs they always are."""
    normalize: Normalize = "none"
    """"fit" takes the mean of each channel of the training inputs away and divides by the standard
    deviation; one pass over the data, by all ranks, before training."""
    workers: int | None = None
    """Threads or processes that read a data set of one's own on each rank: 0 is one thread. Unless
    given, the first samples are measured: threads where they wait or release Python's lock, else
    processes. Datastores have threads of their own."""
    on_error: OnError = "raise"
    """What happens when a sample cannot be read: "raise" ends training with an error that names it;
    "skip" leaves it out, counts it nowhere and lists it in `TrainingResult.skipped`. A data set of
    one's own raises `gpupool.SampleError` for such a sample."""
    max_skipped: float | None = None
    """The share of an epoch's samples that on_error="skip" may leave out before that is an
    error after all (0.001 unless given; one image always may, with all patches of it)."""

    # ---- what a batch is, and what the network and the loss get of it
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples, as `collate_fn` of torch's DataLoader; each rank calls it
    with its own samples. torch's `default_collate` unless given."""
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
    step: Callable[[Any, Any, Any], Any] | None = None
    """A step of one's own, in place of a loss: (network, batch, optimizer) -> the mean loss of the
    batch, to be shown. It calls `backward` and the optimizer; gradients are averaged over ranks
    when the optimizer steps. Of a dict of networks it gets dicts of networks and optimizers."""

    # ---- how a step is computed
    clip: float | None = None
    """Limit on the gradient of the whole batch, measured as `clip_method` says; None: no limit."""
    clip_method: ClipMethod | None = None
    """"global-l2norm" (of all parameters together; so unless given), "l2norm" (of each parameter)
    or "absolute-value" (of each element)."""
    precision: Precision = "float32"
    """"float32", "bf16" or "fp16": mixed by `torch.autocast`; "fp16" scales the loss."""
    compile: bool | CompileMode = False
    """`torch.compile`: True, or one of its modes."""
    channels_last: bool = False
    """Convolutions work on channels-last tensors, which is faster on GPUs."""
    compress: Compress = "none"
    """"bf16" or "fp16" sends gradients between ranks in half the bytes, rounded; "none" as is."""
    batch_norm: BatchNorm = "local"
    """"local" (statistics of a rank's own share), "sync" (of the whole batch) or "frozen" (the
    running ones are used, and stay)."""
    bn_statistics: BnStatistics = "moving"
    """Batch norms' statistics in the end: "moving" averages of training, or of the "population":
    computed over the training data once more."""
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
    is a validation."""
    patience: int | None = None
    """Ends training when so many validations in a row were no better than the best before."""
    min_delta: float = 0.0
    """By how much a validation has to be better for `patience` and schedule="plateau", in the unit
    of `objective`; what is better by less counts as no better. Unless given any improvement counts
    for `patience`, and one in 10,000 for "plateau"."""
    on_divergence: OnDivergence = "stop"
    """When loss is NaN or infinite: "stop" ends training with the last weights that were good,
    "tell" only reports it. A spike of the loss is only reported."""

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
    log_every: int = 10
    """Steps between two reports of all steps since the last; slow steps have one a second."""
    progress: Progress = "auto"
    """Shown in the notebook: "plot", "table", "none"; "auto": a plot where there can be one."""
    callbacks: Sequence[Callable[[Any], Any]] = ()
    """Called on every rank with a `CallbackInfo` at "start", "step", "epoch", "validation",
    "checkpoint" and "end"; True from one ends training on all ranks."""
    tensorboard: str | None = None
    """Folder for TensorBoard's event files, local or in a store."""
    profile: Profile | None = None
    """Steps of which every rank leaves a trace."""

    # ---- where
    execution: Execution = "auto"
    """Which ranks train, and on what: "auto" (all ranks that have a GPU; all ranks on CPU if none
    has); "cpu" and "gpu" (one rank); "multi-gpu" (as many as GPUs of this machine),
    "parallel-auto", "parallel-cpu", "parallel-gpu" (all there are)."""

    def resolve(self, world_size: int) -> Self:
        """Return the options with scale="linear" applied for `world_size` ranks that train.

        `batch_size` and `lr` are multiplied by `world_size`, and a warm-up begins at the unscaled
        learning rate. Resolved options resolve to themselves.
        """
        if self.scale == "none":
            return self
        # As the gradual warm-up of Goyal et al. (section 2.2): from one rank's rate to all ranks'.
        starts_unscaled = self.warmup is not None and self.warmup_factor is None and world_size > 1
        return replace(
            self,
            batch_size=self.batch_size * world_size,
            lr=self.lr * world_size,
            warmup_factor=1 / world_size if starts_unscaled else self.warmup_factor,
            scale="none",
        )

    def most_skipped(self, num_samples: int) -> int:
        """How many of `num_samples` may be left out in an epoch; those of one image always may."""
        if self.on_error != "skip":
            return 0
        share = MAX_SKIPPED if self.max_skipped is None else self.max_skipped
        # The small term: 0.29 * 100 is 28.999... in floats, and `int` would lose one sample.
        return max(1, int(share * num_samples + 1e-9))


class OptionHelp(NamedTuple):
    """What a reader wants to know of one option."""

    name: str
    default: str
    """As it is written; "{}" of a dict."""
    words: tuple[str, ...]
    """The words that it takes, if any; it may take other values too."""
    meaning: str
    """Its docstring."""
    heading: str
    """That of the group in which it stands."""


def option_parameters() -> list[inspect.Parameter]:
    """Every option as a parameter by name, with its default and its words."""
    return parameters(TrainingFields, globals())


def option_help() -> list[OptionHelp]:
    """Every option with its meaning, read from this file.

    Raises:
        OSError: the file is not there.
    """
    lines, _ = inspect.getsourcelines(TrainingFields)
    shown = {one.name: one for one in option_parameters()}
    (class_,) = ast.parse("".join(lines)).body
    assert isinstance(class_, ast.ClassDef)
    headings = [
        (number, line.partition("# ---- ")[2].strip())
        for number, line in enumerate(lines, 1)
        if "# ---- " in line
    ]
    found = []
    for one, below in zip(class_.body, class_.body[1:], strict=False):
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        name = one.target.id
        assert isinstance(below, ast.Expr), f"{name} has no docstring"
        assert isinstance(below.value, ast.Constant)
        default, words = repr(shown[name].default), shown[name].annotation.words
        meaning = inspect.cleandoc(str(below.value.value))
        heading = [text for number, text in headings if number < one.lineno][-1]
        found.append(OptionHelp(name, default, words, meaning, heading))
    return found
