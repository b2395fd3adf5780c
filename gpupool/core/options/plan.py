"""What options come to in one training: the plan, as data, as words and as text. Runs anywhere."""

from __future__ import annotations

from dataclasses import dataclass

from gpupool.core.options.checks import warmup_of
from gpupool.core.options.fields import TrainingFields
from gpupool.core.options.model_facts import ModelFacts
from gpupool.core.options.schedule import WARMUP_FACTOR
from gpupool.core.options.serialise import describe
from gpupool.core.wire.masking import without_passwords

Rows = list[tuple[str, str]]

_SCALED = ("batch_size", "lr")
_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE_CHARS = 40


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank does: its `share` of a whole batch, in samples, or why it has none."""

    rank: int
    device: str
    share: int
    why_idle: str = ""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The effective plan of a training; its text is `str(plan)`, and a notebook draws it.

    `options` are the resolved ones, `before` those that were given. What is not known without a
    model or data is None: `num_samples` of a stream, too. `learning_rates` are (step, rate) at up
    to 200 steps, the first and the last among them.
    """

    options: TrainingFields
    before: TrainingFields
    ranks: tuple[RankPlan, ...]
    num_training: int
    backend: str
    is_stream: bool
    num_samples: int | None
    num_validation: int | None
    has_validation: bool | None
    steps_per_epoch: int | None
    num_steps: int | None
    warmup_steps: int | None
    learning_rates: tuple[tuple[int, float], ...]
    model: ModelFacts | None
    notes: tuple[str, ...] = ()

    @property
    def last_batch(self) -> int | None:
        """Samples in the last batch of an epoch."""
        if not self.num_samples or self.options.batch_sampler is not None:
            return None
        return self.num_samples % self.options.batch_size or self.options.batch_size

    @property
    def scaled(self) -> tuple[tuple[str, float, float], ...]:
        """(option, before, after) of each number that the number of ranks has changed."""
        pairs = (
            (name, getattr(self.before, name), getattr(self.options, name)) for name in _SCALED
        )
        return tuple(pair for pair in pairs if pair[1] != pair[2])

    @property
    def reduced_bytes(self) -> int | None:
        """Bytes of gradients that are summed over the ranks in a step; 0 for one rank."""
        if self.num_training == 1:
            return 0
        if self.model is None:
            return None
        return self.model.trainable_bytes

    @property
    def is_constant(self) -> bool:
        """Whether the learning rate is the same in every step."""
        return len({rate for _, rate in self.learning_rates}) <= 1

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """The plan in words: (title, [(what, value), ...])."""
        return sections(self)

    def __str__(self) -> str:
        return text(self)

    # On a terminal IPython shows the repr; in a notebook `formatters.py` draws the plan.
    __repr__ = __str__


def sections(plan: TrainingPlan) -> list[tuple[str, Rows]]:
    """(title, [(what, value), ...]) of all that is known."""
    found = [
        ("Batches", _batches(plan)),
        ("Learning rate", _learning_rate(plan)),
        ("Each step", _step(plan)),
        ("Validation and end", _end(plan)),
        ("Checkpoints", _checkpoints(plan)),
    ]
    return [(title, rows) for title, rows in found if rows]


def text(plan: TrainingPlan) -> str:
    """The plan for a terminal, a line for each fact and each rank."""
    lines = [headline(plan), *plan.notes]
    for title, rows in sections(plan):
        lines.append(f"{title}:")
        lines += [f"  {what}: {value}" for what, value in rows]
        if title == "Learning rate" and not plan.is_constant:
            lines.append(f"  {sparkline(plan)}")
    lines.append("Ranks:")
    lines += [f"  rank {rank}  {device}  {does}" for rank, device, does in rank_rows(plan)]
    return "\n".join(lines)


def headline(plan: TrainingPlan) -> str:
    """The plan in one line."""
    ranks = _many(plan.num_training, "rank")
    length = _many(plan.options.epochs, "epoch")
    if plan.num_steps is not None:
        length = f"{_many(plan.num_steps, 'step')}, {length}"
        if plan.num_steps == plan.options.max_steps:
            length = f"{_many(plan.num_steps, 'step')} (max_steps)"
    return f"Training on {ranks}: {length}"


def rank_rows(plan: TrainingPlan) -> list[tuple[str, str, str]]:
    """(rank, device, what it does) of each rank of the pool."""
    return [
        (
            str(rank.rank),
            rank.device,
            f"idle: {rank.why_idle}" if rank.why_idle else _share(plan, rank),
        )
        for rank in plan.ranks
    ]


def _share(plan: TrainingPlan, rank: RankPlan) -> str:
    """What a rank does in a step; a sampler's batches are not known before."""
    if plan.options.batch_sampler is not None:
        return "its share of each batch"
    return f"{_many(rank.share, 'sample')} a step"


def sparkline(plan: TrainingPlan) -> str:
    """The curve of the learning rate in a line of blocks, each as high as its first step's."""
    rates = [rate for _, rate in plan.learning_rates]
    num = min(len(rates), _CURVE_CHARS)
    picked = [rates[i * len(rates) // num] for i in range(num)]
    # `text` draws no constant rate, which may be 0 all the time.
    top = max(rates)
    return "".join(_BLOCKS[round(rate / top * (len(_BLOCKS) - 1))] for rate in picked)


def _batches(plan: TrainingPlan) -> Rows:
    options = plan.options
    batch = f"{_many(options.batch_size, 'sample')}{_was(plan, 'batch_size')}"
    if options.batch_sampler is not None:
        batch = f"as the {type(options.batch_sampler).__name__} gives it"
    rows = [("global batch", batch)]
    if plan.num_samples is not None:
        rows.append(("samples", f"{plan.num_samples:,}"))
    if plan.is_stream:
        rows.append(("samples", "a stream: as many as it gives"))
    if plan.steps_per_epoch is not None:
        short = plan.last_batch not in (None, options.batch_size)
        last = f" (the last has {_many(plan.last_batch or 0, 'sample')})" if short else ""
        rows.append(("steps per epoch", f"{plan.steps_per_epoch:,}{last}"))
    if options.accumulate > 1:
        rows.append(("computed in", f"{options.accumulate} parts on each rank"))
    order = {"every-epoch": f"reshuffled every epoch (seed {options.seed})", "never": "as given"}
    if options.batch_sampler is None:
        rows.append(("order", order.get(options.shuffle, f"shuffled once (seed {options.seed})")))
    if options.weights is not None:
        rows.append(("samples of an epoch", "drawn by their weights, with replacement"))
    if options.bucket_by is not None:
        rows.append(("samples of a batch", "of similar length"))
    if options.normalize == "fit":
        rows.append(("inputs", "normalized by the mean and deviation of the training data"))
    return rows


def _learning_rate(plan: TrainingPlan) -> Rows:
    options = plan.options
    rows = [("rate", f"{options.lr:g}{_was(plan, 'lr')}")]
    schedule = describe(options)["schedule"]
    if isinstance(schedule, list):
        schedule = ", then ".join(f"{name} for {_many(n, 'epoch')}" for name, n in schedule)
    rows.append(("schedule", "constant" if schedule == "none" else schedule))
    if options.warmup is not None:
        number, unit = warmup_of(options.warmup)
        known = unit == "epoch" and plan.warmup_steps is not None
        steps = f", {_many(plan.warmup_steps or 0, 'step')}" if known else ""
        first = WARMUP_FACTOR if options.warmup_factor is None else options.warmup_factor
        rows.append(("warm-up", f"{_many(number, unit)}{steps}, from {first * options.lr:g}"))
    if plan.learning_rates and not plan.is_constant:
        rates = [rate for _, rate in plan.learning_rates]
        ends = f"{rates[0]:.3g} in the first step, {rates[-1]:.3g} in the last"
        rows.append(("course", f"{ends}, at most {max(rates):.3g}"))
    rows += [
        ("factor", f"{factor:g} on {pattern}{' (frozen)' if factor == 0 else ''}")
        for pattern, factor in options.learn_rate_factors.items()
    ]
    return rows


def _step(plan: TrainingPlan) -> Rows:
    options = plan.options
    rows = [("optimizer", f"{describe(options)['optimizer']}{_decay(plan)}")]
    if plan.model is not None:
        frozen = f", {plan.model.num_frozen:,} are frozen" if plan.model.num_frozen else ""
        rows.append(("parameters", f"{plan.model.num_trainable:,} train{frozen}"))
    rows.append(("all-reduced", _reduced(plan)))
    rows.append(("precision", options.precision))
    if options.clip is not None:
        rows.append(("gradient", f"norm at most {options.clip:g}"))
    if options.batch_norm != "local" or (plan.model and plan.model.has_batch_norm):
        norms = {"local": "of each rank's share", "sync": "of the whole batch", "frozen": "frozen"}
        rows.append(("batch norm", norms[options.batch_norm]))
    if options.ema is not None:
        rows.append(("averaged weights", f"decay {options.ema:g}; validated and kept"))
    extras = [name for name in ("compile", "channels_last") if getattr(options, name)]
    if extras:
        rows.append(("made faster by", ", ".join(extras)))
    if options.deterministic:
        rows.append(("deterministic", "equal to the last bit on the same kind of GPU"))
    return rows


def _decay(plan: TrainingPlan) -> str:
    decay = plan.options.weight_decay
    return f", weight decay {decay:g}" if decay else ""


def _reduced(plan: TrainingPlan) -> str:
    if plan.num_training == 1:
        return "nothing: one rank"
    if plan.reduced_bytes is None:
        return f"gradients over {plan.backend}"
    return f"{size(plan.reduced_bytes)} of gradients a step, over {plan.backend}"


def _end(plan: TrainingPlan) -> Rows:
    options = plan.options
    rows = []
    if plan.has_validation:
        every = options.validate_every
        when = "every epoch" if every == "epoch" else f"every {_many(int(every), 'step')}"
        num = f"{_many(plan.num_validation, 'sample')}, " if plan.num_validation else ""
        rows.append(("validation", f"{num}{when}"))
    elif plan.has_validation is False:
        rows.append(("validation", "none"))
    stops = [_many(options.epochs, "epoch")]
    if options.max_steps is not None:
        stops.append(_many(options.max_steps, "step"))
    if options.patience is not None:
        worse = f"{_many(options.patience, 'validation')} without a better {options.objective}"
        stops.append(worse)
    stops.append("a loss that is not finite")
    rows.append(("ends after", " or ".join(stops)))
    best = options.keep == "best" or (options.keep == "auto" and plan.has_validation)
    if options.keep != "auto" or plan.has_validation is not None:
        rows.append(
            ("keeps", f"the best weights by {options.objective}" if best else "the last weights")
        )
    return rows


def _checkpoints(plan: TrainingPlan) -> Rows:
    options = plan.options
    if options.checkpoint is None:
        return [("none", "a training that fails starts from the beginning")]
    every = options.checkpoint_every or "epoch"
    if isinstance(every, int):
        every = _many(every, "step")
    rows = [
        ("in", without_passwords(options.checkpoint)),
        ("every", f"{every}, the last {options.num_checkpoints} kept"),
    ]
    if options.resume is not False:
        is_newest = options.resume in (True, "auto")
        from_where = "the newest" if is_newest else without_passwords(str(options.resume))
        rows.append(("resumes from", from_where))
    if options.on_failure == "resume":
        rows.append(("when a rank dies", "it is replaced, and training resumes"))
    return rows


def _was(plan: TrainingPlan, name: str) -> str:
    for option, before, _ in plan.scaled:
        if option == name:
            return f" (scaled from {before:g}, times {_many(plan.num_training, 'rank')})"
    return ""


def size(num_bytes: int) -> str:
    """Bytes in the unit that suits them.

    >>> size(44_700_000), size(900)
    ('44.7 MB', '900 bytes')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return _many(num_bytes, "byte")


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
