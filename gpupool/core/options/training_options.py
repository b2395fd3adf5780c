"""How a network is trained, as one frozen dataclass that is checked when it is made. Runs anywhere.

Fields that are None take the value that their docstring names: so it is known whether one was
given, and one that would have no effect is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gpupool.core.errors import OptionsError
from gpupool.core.options import checks
from gpupool.core.options.checks import flag, folder, must, number, warmup_of
from gpupool.core.options.fields import Needs, Options, explain, is_given, option, without_effect
from gpupool.core.options.named_measures import name_of

_OPTIMIZER = "torch.optim.Adam, or lambda groups: torch.optim.Adam(groups, amsgrad=True)"
MAX_SKIPPED = 0.001  # of the samples of an epoch

# What some options need to have an effect.
_MOMENTUM = Needs("optimizer", ("sgdm", "rmsprop"), "'sgdm'")
_DECAY = Needs("weight_decay", (), "1e-4")
_PIECEWISE = Needs("schedule", ("piecewise",), "'piecewise'")
_CURVE = Needs("schedule", ("cosine", "linear"), "'cosine'")
_FOLDER = Needs("checkpoint", (), "'s3://bucket/run1'")

_EXCLUDE: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (  # if the other has one of these
    ("overwrite", "resume", (True, "auto"), "one begins from scratch, the other does not"),
    ("weights", "shuffle", ("never",), "weights draw an order; shuffle='once' draws it once"),
    ("gather", "accumulate", (), "one has the loss of the whole batch, the other of parts"),
)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TrainingOptions(Options):
    """How a network is trained.

    `batch_size` is global: the samples of one optimizer step over all ranks. Each rank computes its
    share, and the result is that of one process with the whole batch.
    """

    # ---- the optimizer
    optimizer: Literal["sgdm", "adam", "adamw", "rmsprop"] | Callable[..., Any] = option(
        "sgdm", must(callable, f"must be a function of parameter groups, as {_OPTIMIZER}.")
    )
    """"sgdm" (SGD with momentum), "adam", "adamw", "rmsprop" as in `torch.optim`, or a callable:
    parameter groups -> `torch.optim.Optimizer`, as `torch.optim.Adamax` or
    `functools.partial(torch.optim.Adam, betas=(0.8, 0.99))`; its lr is the option `lr`."""
    lr: float = option(0.01, number(above=0))
    """Learning rate."""
    momentum: float | None = option(None, number(least=0, below=1), _MOMENTUM)
    """Momentum of "sgdm" (0.9 unless given; 0 is plain SGD) and of "rmsprop" (0)."""
    weight_decay: float = option(0.0, number(least=0))
    """L2 factor; decoupled for "adamw", added to the gradient otherwise."""
    weight_decay_factors: Mapping[str, float] = option({}, checks.factors, _DECAY)
    """Glob on parameter names -> factor on `weight_decay`. The last matching pattern counts."""
    learn_rate_factors: Mapping[str, float] = option({}, checks.factors)
    """Glob on parameter names -> factor on `lr`; 0 freezes. The last matching pattern counts."""

    # ---- the learning rate over time
    schedule: Literal["none", "piecewise", "cosine", "linear"] | Callable[[int], float] = option(
        "none", must(callable, "must be a function of the step, as lambda step: 1 / step.")
    )
    """"none", "piecewise" (times `drop_factor` every `drop_period` epochs), "cosine" and "linear"
    (down to `min_factor` at the end), or a callable: step, from 1 -> factor on `lr`."""
    drop_factor: float | None = option(None, number(above=0, below=1), _PIECEWISE)
    """Factor of a drop in "piecewise"; 0.1 unless given."""
    drop_period: int | None = option(None, number(whole=True, least=1), _PIECEWISE)
    """Epochs between two drops of "piecewise"; a third of all unless given."""
    min_factor: float | None = option(None, number(least=0, below=1), _CURVE)
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
    shuffle: Literal["every-epoch", "once", "never"] = option("every-epoch")
    """"every-epoch", "once" (the same order each epoch) or "never"."""
    weights: Sequence[float] | Literal["balanced"] | None = option(None, checks.sample_weights)
    """How often each sample is drawn, relative to the others, with replacement, as by torch's
    WeightedRandomSampler. "balanced": each class as often as any other."""
    seed: int = option(0, number(whole=True, least=0, most=2**64 - 1))  # what torch takes
    """Fixes the order of the samples and the random numbers of each rank and step."""
    deterministic: bool = option(False, flag)
    """Two trainings from one `seed`, on as many GPUs of one kind, are equal to the last bit, which
    takes longer; what torch cannot compute so is an error. On CPUs they always are."""
    normalize: Literal["none", "fit"] = option("none")
    """"fit" takes the mean of each channel of the training inputs away and divides by the standard
    deviation; one pass over the data, by all ranks, before training."""
    workers: int | None = option(None, number(whole=True, least=0, most=512))  # more is a slip
    """Processes that read a data set of one's own on each rank, as `num_workers` of torch's
    DataLoader. Unless given, the first batch is measured: as many as the rank has cores, up to
    eight times as many where samples wait, none for little data. Datastores have threads."""
    on_error: Literal["raise", "skip"] = option("raise")
    """When a sample cannot be read: "raise" ends training with an error that names it; "skip"
    leaves it out and lists it in `TrainingResult.skipped`; more than one in 1,000 of an epoch (or
    one image) is an error. One's own data set raises `gpupool.SampleError` for such a sample."""

    # ---- what a batch is, and what the network and the loss get of it
    collate: Callable[[list[Any]], Any] | None = option(None, checks.any_function)
    """Makes a batch of a list of a rank's samples, as `collate_fn` of torch's DataLoader; torch's
    `default_collate` unless given. One that mixes samples has a parameter `training=True`, which is
    False in validation."""
    inputs: str | Sequence[str | int] = option("auto", checks.inputs)
    """What of a batch the network is called with: names or numbers of parts of the batch.
    "auto": of a pair its first half; of named columns those that `forward` takes by name."""
    targets: str | int = option("auto", checks.part)
    """What the loss is given beside the outputs: a name or number of a part of the batch, or
    "batch", all of it. "auto": the second half of a pair, or the column "label", "labels",
    "target" or "targets"; a function whose second argument is called `batch` gets all."""
    weight: Literal["samples", "tokens"] | Callable[[Any], Any] | None = option(
        None, must(callable, "must be a function of the targets, or 'tokens'.")
    )
    """Over what the loss is a mean: "samples", "tokens" (labels that are not -100), or a function
    of what the loss is given, which counts. So ranks with shares of different length equal one.
    Unless given: what a loss of ours or of torch counts itself; samples of any other."""
    gather: bool = option(False, flag)
    """The loss gets the outputs and targets of all ranks, as a loss over pairs of the batch
    needs (contrastive ones, say); each is then what one rank would compute."""

    # ---- how a step is computed
    clip: float | None = option(None, number(above=0))
    """Limit on the norm of the gradient of the whole batch; None: no limit."""
    precision: Literal["float32", "bf16", "fp16"] = option("float32")
    """"float32", "bf16" or "fp16": mixed by `torch.autocast`; "fp16" scales the loss."""
    compile: bool = option(False, flag)
    """Whether the network is compiled by `torch.compile`."""
    channels_last: bool = option(False, flag)
    """Convolutions work on channels-last tensors, which is faster on GPUs."""
    batch_norm: Literal["local", "sync", "frozen"] = option("local")
    """"local" (statistics of a rank's own share), "sync" (of the whole batch) or "frozen" (the
    running ones are used, and stay)."""
    ema: float | None = option(None, number(above=0, below=1))
    """Decay of an exponential moving average of the weights; it is what is validated and kept."""

    # ---- validation, and when to stop
    validate_every: Literal["epoch"] | int = option("epoch", number(whole=True, least=1))
    """"epoch" or a number of steps."""
    metrics: Sequence[Any] | Mapping[str, Any] = option((), checks.one_or_several)
    """What validations measure beside the loss: names ("accuracy", "f1", "mean_iou" ...), functions
    (outputs, targets) -> mean, or torchmetrics objects; or a dict {output: one or several}."""
    objective: str = "loss"
    """What is best: "loss", "accuracy" or the name of one of `metrics`, of validations."""
    keep: Literal["auto", "best", "last"] = option("auto")
    """Which weights the result has: "best" by `objective`, "last", or "auto": the best where there
    is a validation. A loss that is NaN or infinite ends training with the last that were good."""
    patience: int | None = option(None, number(whole=True, least=1))
    """Ends training when so many validations in a row were no better than the best before."""

    # ---- checkpoints
    checkpoint: str | None = option(None, folder)
    """Folder for checkpoints, local or in a store ("s3://bucket/run1")."""
    checkpoint_every: str | int | None = option(None, checks.interval, _FOLDER)
    """"epoch" (unless given), a number of steps, or a time such as "10m"."""
    num_checkpoints: int = option(2, number(whole=True, least=1), _FOLDER)
    """Newest checkpoints that are kept."""
    resume: str | bool = option(False, checks.flag_or_folder)
    """"auto" resumes from the newest checkpoint in `checkpoint`, if there is one; True, if there is
    none, is an error; a URL resumes from that checkpoint, or from the newest one in that folder;
    False starts at step 0."""
    overwrite: bool = option(False, flag, _FOLDER)
    """Begins from scratch although `checkpoint` holds checkpoints of another training: these are
    removed when the first new one is complete, and nothing else is."""
    on_failure: Literal["raise", "resume"] = option("raise", None, _FOLDER)
    """When a rank dies: "raise", or "resume": it is replaced, and training resumes from the newest
    checkpoint."""

    # ---- what is shown
    progress: Literal["auto", "table", "none"] = option("auto")
    """What is shown: "table", "none"; "auto": plots in a notebook, a table elsewhere."""
    callbacks: Sequence[Callable[[Any], Any]] = option((), checks.functions)
    """Called on every rank with a `CallbackInfo` at "start", "step", "epoch", "validation",
    "checkpoint" and "end"; True from one ends training on all ranks."""
    profile: str | None = option(None, folder)
    """Folder, local or in a store, for a trace of steps 11 to 15 from every rank, for Perfetto and
    TensorBoard; `result.profile` has the dearest operators."""

    def __post_init__(self) -> None:
        if "lr" in getattr(self.optimizer, "keywords", ()):  # of a partial
            raise OptionsError("optimizer: its lr is that of each step, give it as the option lr.")
        Options.__post_init__(self)  # slots=True makes a second class: `super()` means the first
        _check_together(self)

    def most_skipped(self, num_samples: int) -> int:
        """How many of `num_samples` may be left out in an epoch; those of one image always may."""
        return max(1, int(MAX_SKIPPED * num_samples)) if self.on_error == "skip" else 0


explain(TrainingOptions)


def _check_together(options: TrainingOptions) -> None:
    """Refuse options that exclude each other, or do nothing together."""
    # A URL names its own place.
    if options.resume in (True, "auto") and options.checkpoint is None:
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


def check_for(options: TrainingOptions, *, has_validation: bool, num_samples: int | None) -> None:
    """OptionsError for what does nothing with these data; `num_samples` is None of a stream."""
    names = ("patience", "objective", "validate_every", "metrics")
    idle = [name for name in names if is_given(options, name)]
    # keep="last" is what happens without validation, and does no harm.
    idle += ["keep"] * (options.keep == "best")
    if idle and not has_validation:
        why = "without validation data: did you mean train(..., validation=...)?"
        raise without_effect(options, idle[0], why)
    if num_samples is None:
        is_curve = options.schedule in ("cosine", "linear") and options.max_steps is None
        in_epochs = options.warmup is not None and warmup_of(options.warmup)[1] == "epoch"
        for name, is_so, meant in (
            ("workers", options.workers is not None, "each rank walks through all of it"),
            ("on_error", options.on_error == "skip", "let it leave out what it cannot read"),
            ("schedule", is_curve, "give max_steps, or a callable"),
            ("warmup", in_epochs, "give a number of steps"),
        ):
            if is_so:
                raise OptionsError(f"{name}={getattr(options, name)!r} on a stream: {meant}.")
        return
    per_epoch = -(-num_samples // options.batch_size)
    planned, most = options.epochs * per_epoch, options.max_steps
    if most is not None and most > planned:
        why = f"while epochs is {options.epochs}, which are {planned:,} steps"
        meant = f"did you mean epochs={-(-most // per_epoch)}?"
        raise without_effect(options, "max_steps", f"{why}: {meant}")


def merged(
    loss: Any, options: TrainingOptions | None, keywords: Mapping[str, Any]
) -> tuple[Any, TrainingOptions]:
    """The loss and options of a call of `train`: `keywords` replace single fields of `options`. An
    OptionsError for a name that is no option, and for a wrong value."""
    if isinstance(loss, TrainingOptions) and options is None:  # train(model, dataset, options)
        loss, options = "auto", loss
    options = TrainingOptions() if options is None else options
    if not isinstance(options, TrainingOptions):
        raise OptionsError(
            f"options is a {type(options).__name__}: give a gpupool.TrainingOptions(...), or its "
            "fields by name, as train(model, dataset, epochs=1)."
        )
    # `replace` makes new options, which are checked as a whole.
    return loss, replace(options, **keywords) if keywords else options
