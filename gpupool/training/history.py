"""The state of a training as the client sees it: events in, numbers and phrases for views out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gpupool.core.formatting import NONE, done_of, duration, measured, number, percent
from gpupool.core.wire import events

_KEPT = ("notice", "aside", "restarts", "ranks", "options")  # where a training begins again


@dataclass
class Reads:
    """The fields of `DataEvent`, summed."""

    num_retried: int = 0
    reason: str = ""
    num_skipped: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    read_by: str = ""

    def add(self, event: events.DataEvent) -> None:
        self.num_retried += event.num_retried
        self.reason = event.reason or self.reason  # of the last that was tried again
        self.num_skipped += event.num_skipped
        self.skipped.update(event.skipped)
        self.read_by = event.read_by or self.read_by

    def words(self) -> list[str]:
        retried = f"{many(self.num_retried, 'read')} retried"
        retried += f" ({self.reason})" if self.reason else ""
        skipped = f"{many(self.num_skipped, 'sample')} skipped"
        return [retried] * bool(self.num_retried) + [skipped] * bool(self.num_skipped)


@dataclass
class TrainingHistory:
    """Everything that has been reported so far, in order.

    `steps[i]` is step i + 1, also of a training that has resumed; of `validations` `best` is the
    best one by `objective`. `status` is one of "starting", "training", "stopping", "finished",
    "stopped" and "failed"; `error` is the message of a failure; `notice` something to know while it
    continues, such as that ranks hang; `aside` what happens beside the steps. `checkpoint` is the
    newest one that was made, `resumed` that from which it began. `restarts` has a sentence on each
    rank that was lost, `ranks` what each has reported last. `options` are those that were not the
    usual ones, as they are written: {"optimizer": "'adam'"}.
    """

    start: events.StartEvent | None = None
    steps: list[events.StepEvent] = field(default_factory=list)
    validations: list[events.ValidationEvent] = field(default_factory=list)
    best: events.ValidationEvent | None = None
    end: events.EndEvent | None = None
    status: str = "starting"
    error: str = ""
    notice: str = ""
    aside: events.ProgressEvent | None = None
    reads: Reads = field(default_factory=Reads)
    warnings: list[events.WarningEvent] = field(default_factory=list)
    checkpoint: events.CheckpointEvent | None = None
    resumed: events.ResumeEvent | None = None
    restarts: list[str] = field(default_factory=list)
    ranks: dict[int, events.RankEvent] = field(default_factory=dict)
    profile: events.ProfileEvent | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    # Kept up to date: views ask many times a second, over many thousand steps.
    elapsed_s: float = field(default=0.0, init=False)  # to the last event
    _num_samples: int = field(default=0, init=False)
    _training_s: float = field(default=0.0, init=False)  # validations left out
    _told_s: float = field(default=0.0, init=False)  # when the last step or validation was over

    def __repr__(self) -> str:
        # Not all of its fields: thousands of steps would stay in the notebook's file.
        return f"TrainingHistory({self.line()})"

    def to_frame(self) -> Any:
        """The steps as a DataFrame of pandas, which has to be there: the fields of `StepEvent`, and
        where there was a validation validation_loss, validation_accuracy and its metrics."""
        import pandas

        rows = {step.step: asdict(step) for step in self.steps}
        for one in self.validations:
            # One before the first step, of a training that was resumed, has a row of its own.
            row = rows.setdefault(one.step, {"step": one.step, "epoch": one.epoch})
            found = {"loss": one.loss, "accuracy": one.accuracy, **one.metrics}
            row |= {f"validation_{name}": value for name, value in found.items()}
        # An empty history has the index, too.
        return pandas.DataFrame(list(rows.values()) or {"step": []}).set_index("step")

    def add(self, event: events.Event) -> None:
        match event:
            case events.StartEvent():
                status = "stopping" if self.status == "stopping" else "training"
                usual = TrainingHistory(event, status=status)
                for one in fields(self):  # what came before is reported again
                    if one.name not in _KEPT:
                        setattr(self, one.name, getattr(usual, one.name))
            case events.StepEvent():
                self.steps.append(event)
                self.aside = None
                self._num_samples += event.num_samples
                self._training_s += event.elapsed_s - self._told_s
                self._told_s = event.elapsed_s
            case events.ProgressEvent():
                self.aside = None if 0 < event.total <= event.done else event
            case events.ValidationEvent():
                self.validations.append(event)
                self.aside = None
                if event.is_best:  # the ranks decide that, by `objective`
                    self.best = event
                self._told_s = event.elapsed_s
            case events.DataEvent():
                self.reads.add(event)
            case events.WarningEvent():
                self.warnings.append(event)
            case events.CheckpointEvent():
                self.checkpoint = event
            case events.ResumeEvent():
                self.resumed = event
            case events.ProfileEvent():
                self.profile = event
            case events.RankEvent():
                self.ranks[event.rank] = event
            case events.EndEvent():
                self.end = event
                is_done = event.stopped_by in ("epochs", "max_steps")
                self.status = "finished" if is_done else "stopped"
        self.elapsed_s = max(self.elapsed_s, getattr(event, "elapsed_s", 0.0))

    @property
    def stage(self) -> str:
        """What happens beside the steps, in words; "" while there are steps, and at the end."""
        return self.aside.what if self.aside is not None and not self.is_over else ""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.status in events.OVER

    @property
    def newest(self) -> events.CheckpointEvent | events.ResumeEvent | None:
        """The newest checkpoint: that from which it has resumed, as long as it has made none."""
        made = [event for event in (self.checkpoint, self.resumed) if event is not None]
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
    def throughput(self) -> float:
        """Samples per second over all steps so far, waiting for data included, validation not."""
        return self._num_samples / self._training_s if self._training_s > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace so far; None where nobody knows, as while it stops."""
        if self.is_over or self.status == "stopping" or not 0 < self.progress < 1:
            return None
        return self.elapsed_s * (1 - self.progress) / self.progress

    def line(self) -> str:
        """The state in one line of text, for terminals and logs: "training  epoch 4/6  step 560/900
        62%  loss 0.2100  acc 89.9%  val 89.6%  1 min 10 s left  39,600 images/s".

        >>> TrainingHistory().line()
        'starting'
        """
        stage, aside = self.stage, self.aside
        if stage and aside and aside.total:
            stage += f" ({done_of(aside.done, aside.total, aside.unit)})"
        # Before the first step there is no loss to show, and a failure here has no numbers either.
        if self.start is None or not self.steps:
            failed = f"failed: {self.error}" if self.status == "failed" else ""
            return failed or (f"starting: {stage}" if stage else self.status)
        last, val = self.steps[-1], self.validations[-1] if self.validations else None
        eta = self.eta_s
        parts = [
            f"{self.status}  epoch {last.epoch}/{self.start.num_epochs}",
            f"step {last.step}/{self.num_steps or '?'}",
            f"{int(100 * self.progress)}%" if self.num_steps and not self.is_over else "",
            f"loss {last.loss:.4f}",
            "" if last.accuracy is None else f"acc {last.accuracy:.1%}",
            f"val {val.loss:.4f}" if val and val.accuracy is None else "",
            f"val {val.accuracy:.1%}" if val and val.accuracy is not None else "",
            stage,
            duration(self.elapsed_s) if eta is None else f"{duration(eta)} left",
            f"{number(self.throughput)} {self.start.unit}/s",
            *self.reads.words(),
            many(len(self.warnings), "warning") if self.warnings else "",
            self.error if self.status == "failed" else "",
        ]
        return "  ".join(filter(None, parts))


def no_improvement(history: TrainingHistory) -> str:
    """What patience has ended it for: "no improvement for 5 validations (patience)"."""
    num = history.start.patience if history.start else 0
    lasted = f" for {many(num, 'validation')}" if num else ""
    return f"no improvement{lasted} (patience)"


def best_of(history: TrainingHistory) -> str:
    """The value that makes it the best, and when it was: "86.3 % after step 450"."""
    best, by = history.best, history.start.objective if history.start else ""
    if best is None:
        return NONE
    if by == "accuracy" and best.accuracy is not None and by not in best.metrics:
        return f"{percent(best.accuracy)} {after(best)}"
    value = best.metrics.get(by, best.loss if by == "loss" else None)
    return after(best) if value is None else f"{by} {measured(by, value)} {after(best)}"


def after(event: events.CheckpointEvent | events.ResumeEvent | events.ValidationEvent) -> str:
    return f"after step {number(event.step)}"


def figure(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"


def many(count: int, what: str) -> str:
    """A count with its noun.

    >>> many(1, "read"), many(1200, "read")
    ('1 read', '1,200 reads')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"
