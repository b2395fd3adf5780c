"""The state of a training as the client sees it: events in, numbers and one line of text out.

Runs on the client. Views (`notebook/`) read a `TrainingHistory` and do no arithmetic of their
own beyond scaling to pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

from gpupool.core.errors import TrainingError
from gpupool.core.formatting import done_of
from gpupool.core.wire.events import (
    CheckpointEvent,
    DataEvent,
    EndEvent,
    Event,
    ProgressEvent,
    RankEvent,
    ResumeEvent,
    StartEvent,
    StepEvent,
    ValidationEvent,
    WarningEvent,
)
from gpupool.training.read_totals import Reads, many

OVER = ("finished", "stopped", "failed")
_COMPLETE = ("epochs", "max_steps")  # what ends a training that has done all it was to do
_SLOW = 0.15  # a rank that needs so much longer than the others is worth reporting,
_OF_STEP = 0.1  # if that is so much of a step
BAR_CHARS = 20
HALF_LIFE = 0.02  # of the drawn steps: the width of smoothing unless chosen
_LEAST = ("step", "rate", "bar", "loss")  # what a narrow terminal does without, in this order


def smoothed(
    means: Iterable[tuple[float, float, int]], half_life: float
) -> list[tuple[float, float]]:
    """A curve without its noise: at each point the weighted mean of all that has been so far.

    The weight of a step halves with each `half_life` steps. There is no value to start from, so a
    curve of three points is not drawn towards its first one.

    Args:
        means: (step, the mean of some steps up to it, how many they are), in order of the steps.

    >>> smoothed([(1, 4.0, 1), (2, 1.0, 1)], half_life=1)
    [(1, 4.0), (2, 2.0)]
    """
    found: list[tuple[float, float]] = []
    total = weight = 0.0
    for step, mean, count in means:
        past = max(0.0, step - found[-1][0]) if found else 0.0
        kept = 0.5 ** (past / half_life)
        total, weight = kept * total + count * mean, kept * weight + count
        found.append((step, total / weight))
    return found


class Slowest(NamedTuple):
    """The rank that the others wait for: its own work takes `share` longer than theirs does."""

    rank: int
    share: float


@dataclass
class TrainingHistory:
    """Everything that has been reported so far, in order.

    `steps[i]` is step i + 1, also of a training that has resumed from a checkpoint; `validations`
    has one entry per validation. `status` is one of "starting", "training", "stopping", "finished",
    "stopped" and "failed"; `error` is the message of a failure; `notice` something to know while it
    continues, such as that ranks hang; `aside` what happens beside the steps: before the first one,
    while validating or saving; None while there are steps; `reads` what reading the data took.

    `warnings` are of divergence, checkpoints that failed and the like; `checkpoint` is the newest
    one, `resumed` from which it began. `restarts` has a sentence on each rank that was lost.
    `ranks` has what each rank has reported last of how it fares, or has fared in the end.
    `options` are those that were not the usual ones, as they are written: {"optimizer": "'adam'"}.
    """

    start: StartEvent | None = None
    steps: list[StepEvent] = field(default_factory=list)
    validations: list[ValidationEvent] = field(default_factory=list)
    end: EndEvent | None = None
    status: str = "starting"
    error: str = ""
    notice: str = ""
    aside: ProgressEvent | None = None
    reads: Reads = field(default_factory=Reads)
    warnings: list[WarningEvent] = field(default_factory=list)
    checkpoint: CheckpointEvent | None = None
    resumed: ResumeEvent | None = None
    restarts: list[str] = field(default_factory=list)
    ranks: dict[int, RankEvent] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    # Kept up to date: views ask many times a second, over many thousand steps.
    _num_samples: int = field(default=0, init=False)
    _data_wait_s: float = field(default=0.0, init=False)
    _validation_s: float = field(default=0.0, init=False)  # before the last step
    _newest_validation_s: float = field(default=0.0, init=False)  # after it
    _noted_s: float = field(default=0.0, init=False)  # seconds, when last noted aside
    _best: int = field(default=-1, init=False)  # index into `validations`

    def __repr__(self) -> str:
        # Not all of its fields: thousands of steps would stay in the notebook's file.
        return f"TrainingHistory({self.line()})"

    def to_frame(self) -> Any:
        """The steps as a pandas DataFrame, by step: epoch, loss, accuracy, lr, num_samples,
        elapsed_s, data_wait_s; and, where there was a validation, validation_loss,
        validation_accuracy and its metrics.

        Raises TrainingError without pandas.
        """
        try:
            import pandas
        except ImportError:
            raise TrainingError(
                "history.to_frame() needs pandas: pip install pandas, or read history.steps."
            ) from None
        rows = {step.step: asdict(step) for step in self.steps}
        for one in self.validations:
            # One before the first step, of a training that was resumed, has a row of its own.
            row = rows.setdefault(one.step, {"step": one.step, "epoch": one.epoch})
            found = {"loss": one.loss, "accuracy": one.accuracy, **one.metrics}
            row |= {f"validation_{name}": value for name, value in found.items()}
        columns = list(dict.fromkeys(["step", *(name for row in rows.values() for name in row)]))
        return pandas.DataFrame(list(rows.values()), columns=columns).set_index("step")

    def add(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case StartEvent():
                self._forget()  # what came before is reported again
                self.start, self.status = event, "training"
            case StepEvent():
                self._add_step(event)
                self.aside = None
            case ProgressEvent():
                is_over = 0 < event.total <= event.done
                self.aside = None if is_over else event
                self._noted_s = max(self._noted_s, event.elapsed_s)
            case ValidationEvent():
                self._add_validation(event)
                self.aside = None
            case DataEvent():
                self.reads.add(event)
            case WarningEvent():
                self.warnings.append(event)
            case CheckpointEvent():
                self.checkpoint = event
            case ResumeEvent():
                self.resumed = event
            case RankEvent():
                self.ranks[event.rank] = event
            case EndEvent():
                self.end = event
                self.status = "finished" if event.stopped_by in _COMPLETE else "stopped"

    def _forget(self) -> None:
        """Forget what was reported before."""
        self.steps, self.validations, self.warnings = [], [], []
        self.reads, self.end, self.checkpoint, self.resumed = Reads(), None, None, None
        self._num_samples, self._data_wait_s, self._noted_s = 0, 0.0, 0.0
        self._validation_s, self._newest_validation_s, self._best = 0.0, 0.0, -1

    def _add_step(self, event: StepEvent) -> None:
        # Appended, as a StartEvent cleared the list: `steps[i]` is step i + 1 after a restart, too.
        self.steps.append(event)
        self._num_samples += event.num_samples
        self._data_wait_s += event.data_wait_s
        # Counted only when a step follows: `throughput` divides by the time up to the last step.
        self._validation_s += self._newest_validation_s
        self._newest_validation_s = 0.0

    def _add_validation(self, event: ValidationEvent) -> None:
        if event.is_best:
            # The ranks decide what is best (`objective`); here only the place is kept.
            self._best = len(self.validations)
        self.validations.append(event)
        if self.steps:
            self._newest_validation_s = event.elapsed_s - self.steps[-1].elapsed_s

    @property
    def stage(self) -> str:
        """What happens beside the steps, in words; "" while there are steps, and at the end."""
        return self.aside.what if self.aside is not None and not self.is_over else ""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.status in OVER

    @property
    def best(self) -> ValidationEvent | None:
        """The best validation so far."""
        return self.validations[self._best] if self._best >= 0 else None

    @property
    def num_without_improvement(self) -> int:
        """How many validations there were since the best one; what `patience` limits."""
        return len(self.validations) - 1 - self._best if self._best >= 0 else 0

    @property
    def slowest(self) -> Slowest | None:
        """The rank that the others wait for, if its own work takes over 15 % longer than theirs.

        `share` is over the median of the others. None where that is less than a tenth of a step,
        as where steps are so short that each rank waits mostly for messages, and of a single rank.
        """
        work = {rank: event.work_s for rank, event in self.ranks.items() if event.work_s}
        if len(work) < 2:
            return None
        rank = max(work, key=lambda one: work[one])
        # The median: a second slow rank must not hide the slowest.
        others = median(seconds for one, seconds in work.items() if one != rank)
        share = work[rank] / others - 1
        # A share alone would name a rank for microseconds where steps do next to nothing.
        matters = work[rank] - others > _OF_STEP * (self.ranks[rank].step_s or 0.0)
        return Slowest(rank, share) if share > _SLOW and matters else None

    @property
    def newest(self) -> CheckpointEvent | ResumeEvent | None:
        """The newest checkpoint: one that was made, or the one that it has resumed from."""
        made = [event for event in (self.checkpoint, self.resumed) if event is not None]
        # A resumed run may fail before it has saved: then the one it came from is the newest.
        return max(made, key=lambda event: event.step, default=None)

    @property
    def loss(self) -> list[float]:
        """Mean loss of each step's global batch."""
        return [s.loss for s in self.steps]

    @property
    def accuracy(self) -> list[float | None]:
        """Accuracy (0..1) of each step's global batch; None where it is not defined."""
        return [s.accuracy for s in self.steps]

    @property
    def num_steps(self) -> int:
        """Steps the whole training takes; 0 before it has started, and where nobody knows."""
        if self.start is None:
            return 0
        return self.start.num_steps or self.start.num_epochs * self.start.steps_per_epoch

    @property
    def progress(self) -> float:
        """Share of the steps done, 0..1; a stream may be over before `max_steps`."""
        if self.status == "finished":
            return 1.0
        return min(1.0, len(self.steps) / self.num_steps) if self.num_steps else 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start of training to the last event; also a validation has some."""
        last = [s.elapsed_s for s in self.steps[-1:]] + [v.elapsed_s for v in self.validations[-1:]]
        return self.end.elapsed_s if self.end else max([self._noted_s, *last])

    @property
    def throughput(self) -> float:
        """Samples per second over all steps so far, waiting for data included.

        Validation does not count: its time is taken out of the span.
        """
        if not self.steps:
            return 0.0
        seconds = self.training_s
        return self._num_samples / seconds if seconds > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace so far, or None where nobody knows.

        As while it stops, and after the last step: no pace says how long it validates and saves.
        """
        if self.end or self.status == "stopping" or not 0 < self.progress < 1:
            return None
        return self.elapsed_s * (1 - self.progress) / self.progress

    @property
    def training_s(self) -> float:
        """Seconds of training up to the last step, validations left out."""
        return self.steps[-1].elapsed_s - self._validation_s if self.steps else 0.0

    @property
    def data_wait_s(self) -> float:
        """Seconds of `training_s` that rank 0 waited for data."""
        return self._data_wait_s

    @property
    def data_wait_share(self) -> float:
        """Share of the training time that rank 0 waited for data, 0..1."""
        seconds = self.training_s
        return self._data_wait_s / seconds if seconds > 0 else 0.0

    def line(self) -> str:
        """The state in one line of text, for terminals and logs; see `status_line`.

        >>> TrainingHistory().line()
        'starting'
        """
        return status_line(self)


def fitting_line(history: TrainingHistory, width: int) -> str:
    """`status_line` in at most `width` characters: the least of its parts are left out first."""
    left_out = 0
    # Built again for each part: how wide a part is depends on its numbers.
    while len(line := status_line(history, _LEAST[:left_out])) > width and left_out < len(_LEAST):
        left_out += 1
    return line[:width]


def status_line(history: TrainingHistory, without: Sequence[str] = ()) -> str:
    """The state of a training.

    "training  epoch 4/6  step 560/900  [===========>        ] 62%  loss 0.2100  acc 89.9%
    val 89.6%  39.6k img/s  eta 1:10" while it runs; once it is over the time it took, no bar.

    Args:
        without: parts that are left out, of `_LEAST`.
    """
    # Before the first step there is no loss to show, and a failure here has no numbers either.
    if history.start is None or not history.steps:
        if history.status == "failed":
            return f"failed: {history.error}"
        return f"starting: {stage(history)}" if history.stage else history.status
    last, start = history.steps[-1], history.start
    parts = [history.status, f"epoch {last.epoch}/{start.num_epochs}"]
    if "step" not in without:
        parts.append(f"step {last.step}/{history.num_steps or '?'}")
    if history.num_steps and not history.is_over:
        percent = f"{int(100 * history.progress)}%"
        parts.append(percent if "bar" in without else bar(history.progress))
    if "loss" not in without or last.accuracy is None:
        parts.append(f"loss {last.loss:.4f}")
    if last.accuracy is not None:
        parts.append(f"acc {last.accuracy:.1%}")
    if history.validations:
        value = history.validations[-1]
        shown = f"{value.accuracy:.1%}" if value.accuracy is not None else f"{value.loss:.4f}"
        parts.append(f"val {shown}")
    if history.stage:
        parts.append(stage(history))
    if "rate" not in without:
        unit = "img" if start.unit == "images" else "samples"
        parts.append(f"{rate(history.throughput)} {unit}/s")
    eta = None if history.is_over else history.eta_s
    parts.append(f"{history.elapsed_s:.1f} s" if eta is None else f"eta {clock(eta)}")
    parts += history.reads.words()
    if history.warnings:
        parts.append(many(len(history.warnings), "warning"))
    if history.status == "failed":
        parts.append(history.error)
    return "  ".join(parts)


def stage(history: TrainingHistory) -> str:
    """What happens beside the steps, and how far: "saving the network (12.3 of 98.0 MB)"."""
    aside = history.aside
    if aside is None or not history.stage:
        return ""
    done = done_of(aside.done, aside.total, aside.unit)
    return f"{aside.what} ({done})" if done else aside.what


def bar(share: float) -> str:
    """A share (0..1) as a bar of text.

    >>> bar(0.62), bar(1)
    ('[===========>        ] 62%', '[====================] 100%')
    """
    done = int(BAR_CHARS * share)
    drawn = ("=" * (done - 1) + ">" if done else "") if share < 1 else "=" * BAR_CHARS
    return f"[{drawn:<{BAR_CHARS}}] {int(100 * share)}%"


def rate(a_second: float) -> str:
    """A rate in at most five characters.

    >>> rate(39_600), rate(412.3), rate(2.345)
    ('39.6k', '412', '2.3')
    """
    if a_second >= 10_000:
        return f"{a_second / 1000:.1f}k"
    return f"{a_second:.0f}" if a_second >= 10 else f"{a_second:.1f}"


def clock(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> clock(70), clock(3725)
    ('1:10', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
