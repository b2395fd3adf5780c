"""The state of a training as the client sees it: events in, numbers out, no drawing.

Runs on the client. Views (`notebook/`) read a `TrainingHistory` and do no arithmetic of their
own beyond scaling to pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gpupool.core.events import DataEvent, EndEvent, Event, StartEvent, StepEvent, ValidationEvent

OVER = ("finished", "stopped", "failed")


def smooth(previous: float | None, value: float, weight: float = 0.9) -> float:
    """The next value of an exponential moving average, which starts anew after NaN or infinity."""
    if previous is None or not math.isfinite(previous):
        return value
    return weight * previous + (1 - weight) * value


@dataclass
class Reads:
    """What reading the data took so far, over all ranks.

    `num_retried` reads failed and were made again, the last one because of `reason`. `skipped` maps
    the URLs of samples that were left out to what is wrong with them: "missing", "changed",
    "empty", "damaged" ...
    """

    num_retried: int = 0
    reason: str = ""
    num_skipped: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    _epoch: int = field(default=0, init=False, repr=False)
    _num_reads: int = field(default=0, init=False, repr=False)
    _num_cached: int = field(default=0, init=False, repr=False)

    def add(self, event: DataEvent) -> None:
        """Take in the next event."""
        if event.epoch != self._epoch:
            self._epoch, self._num_reads, self._num_cached = event.epoch, 0, 0
        self._num_reads += event.num_reads
        self._num_cached += event.num_cached
        self.num_retried += event.num_retried
        self.reason = event.reason or self.reason
        self.num_skipped += event.num_skipped
        self.skipped.update(event.skipped)

    @property
    def cached_share(self) -> float | None:
        """Of the reads of the present epoch, the share that came from the cache; None: no cache."""
        return self._num_cached / (self._num_reads + self._num_cached) if self._num_cached else None

    def words(self) -> list[str]:
        """What is worth telling, a phrase each.

        >>> Reads(num_retried=12, reason="503 SlowDown", num_skipped=1).words()
        ['12 reads retried (503 SlowDown)', '1 sample skipped']
        """
        told = []
        if self.num_retried:
            reason = f" ({self.reason})" if self.reason else ""
            told.append(f"{_many(self.num_retried, 'read')} retried{reason}")
        if self.num_skipped:
            told.append(f"{_many(self.num_skipped, 'sample')} skipped")
        if self.cached_share is not None:
            told.append(f"{self.cached_share:.0%} from the cache")
        return told


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


@dataclass
class TrainingHistory:
    """Everything that has been reported so far, in order.

    `steps[i]` is step i + 1; `validations` has one entry per validated epoch. `status` is one of
    "starting", "training", "stopping", "finished", "stopped" and "failed"; `error` is the
    message of a failure; `notice` something to know while it goes on, such as that ranks hang;
    `reads` what reading the data took.
    """

    start: StartEvent | None = None
    steps: list[StepEvent] = field(default_factory=list)
    validations: list[ValidationEvent] = field(default_factory=list)
    end: EndEvent | None = None
    status: str = "starting"
    error: str = ""
    notice: str = ""
    reads: Reads = field(default_factory=Reads)
    # Sums over `steps`, kept up to date: views ask many times a second, over many thousand steps.
    _num_samples: int = field(default=0, init=False, repr=False)
    _data_wait_s: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        self._num_samples = sum(s.num_samples for s in self.steps)
        self._data_wait_s = sum(s.data_wait_s for s in self.steps)

    def add(self, event: Event) -> None:
        """Take in the next event."""
        match event:
            case StartEvent():
                self.start, self.status = event, "training"
            case StepEvent():
                self.steps.append(event)
                self._num_samples += event.num_samples
                self._data_wait_s += event.data_wait_s
            case ValidationEvent():
                self.validations.append(event)
            case DataEvent():
                self.reads.add(event)
            case EndEvent():
                self.end = event
                self.status = "stopped" if event.stopped_by == "user" else "finished"

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.status in OVER

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
        """Steps the whole training takes; 0 before it has started."""
        return self.start.num_epochs * self.start.steps_per_epoch if self.start else 0

    @property
    def progress(self) -> float:
        """Share of the steps done, 0..1."""
        return len(self.steps) / self.num_steps if self.num_steps else 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start of training to the last event."""
        last = [s.elapsed_s for s in self.steps[-1:]] + [v.elapsed_s for v in self.validations[-1:]]
        return self.end.elapsed_s if self.end else max(last, default=0.0)

    @property
    def throughput(self) -> float:
        """Samples per second over all steps so far, waiting for data included.

        Validation does not count: its time is taken out of the span.
        """
        if not self.steps:
            return 0.0
        seconds = self.steps[-1].elapsed_s - self._validation_s()
        return self._num_samples / seconds if seconds > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace so far, or None before the first step."""
        if not self.steps or self.end:
            return None
        return self.elapsed_s * (1 - self.progress) / self.progress

    @property
    def data_wait_share(self) -> float:
        """Share of the training time that rank 0 waited for data, 0..1."""
        seconds = self.steps[-1].elapsed_s - self._validation_s() if self.steps else 0.0
        return self._data_wait_s / seconds if seconds > 0 else 0.0

    def smoothed(self, values: list[float], weight: float = 0.9) -> list[float]:
        """Exponential moving average, started at the first value (as MATLAB's plot draws it)."""
        out: list[float] = []
        for value in values:
            out.append(smooth(out[-1] if out else None, value, weight))
        return out

    def _validation_s(self) -> float:
        """Seconds spent in validations that came before the last step."""
        total = 0.0
        for event in self.validations:
            if event.step < len(self.steps):
                total += event.elapsed_s - self.steps[event.step - 1].elapsed_s
        return total

    def line(self) -> str:
        """The state in one line of text, for terminals and logs.

        >>> TrainingHistory().line()
        'starting'
        """
        if self.start is None or not self.steps:
            return f"failed: {self.error}" if self.status == "failed" else self.status
        last, start = self.steps[-1], self.start
        parts = [
            self.status,
            f"epoch {last.epoch}/{start.num_epochs}",
            f"step {last.step}/{self.num_steps}",
            f"loss {last.loss:.4f}",
        ]
        if last.accuracy is not None:
            parts.append(f"accuracy {last.accuracy:.1%}")
        if self.validations:
            value = self.validations[-1]
            shown = f"{value.accuracy:.1%}" if value.accuracy is not None else f"{value.loss:.4f}"
            parts.append(f"validation {shown}")
        parts += [f"{self.throughput:.0f} images/s", f"{self.elapsed_s:.1f} s"]
        parts += self.reads.words()
        if self.status == "failed":
            parts.append(self.error)
        return "  ".join(parts)
