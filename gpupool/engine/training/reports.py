"""What training reports: sums over the ranks, a block of steps at a time. Runs on engines.

reporter.add(run.step, ...)        # in each step: loss and counts stay on the device
reporter.begin()                   # every 10 steps: one small all-reduce, begun
steps = reporter.finish()          # a step later: all ranks know the same from here on
steps = reporter.flush()           # both at once, where something depends on the steps

With them travels how many reads each rank has made again, and how many samples it has skipped.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpupool.core.errors import TrainingError
from gpupool.core.options.schedule import total_steps
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import Progress
from gpupool.core.wire import events
from gpupool.core.wire.events import DataEvent, Event, ProgressEvent, StepEvent, ValidationEvent
from gpupool.data import device as devices
from gpupool.data.datastores.base import Datastore
from gpupool.data.reading import loader
from gpupool.data.reading.inputs import parts
from gpupool.data.reading.samples import Skipped
from gpupool.data.stores.retry import counts
from gpupool.engine.batches.shares import Dataset, Share, num_samples
from gpupool.engine.group.forming import World
from gpupool.engine.group.sums import Sums
from gpupool.engine.metrics.evaluation import Evaluation, quotient

REPORT_EVERY_S = 1.0
REPORT_EVERY = 10  # steps, where a second has more
_NUM_READ = 2  # numbers of each rank about what it has read
_MAX_NAMED = 5  # samples that an error names
_row = attrgetter(*(one.name for one in fields(StepEvent)))
_NUM_FIELDS = len(fields(StepEvent))
_PART = 1000  # events in one message: a history of any length passes
_KEPT = (ValidationEvent, events.WarningEvent, events.CheckpointEvent)


class BatchMetrics(NamedTuple):
    """Loss and counts of a micro-batch: numbers, or tensors on the device that nobody has read.

    `loss_count`: over how much `mean_loss` is a mean. `num_labeled`: targets that have a class.
    """

    num_here: int
    mean_loss: Tensor
    loss_count: int | Tensor
    num_correct: int | Tensor = 0
    num_labeled: int | Tensor = 0


class Pass:
    """An epoch, or a validation: what errors call it, and what all ranks have skipped in it."""

    def __init__(self, name: str, dataset: Dataset, options: TrainingOptions) -> None:
        self._name, self._num_samples = name, num_samples(dataset)
        self._most_skipped = options.most_skipped(self._num_samples)
        self._skipped: list[Skipped] = []

    def add(self, skipped: Sequence[Skipped]) -> None:
        """Raises TrainingError if it is more than may be."""
        found = self._skipped
        found += skipped
        # Of one damaged image a patch datastore may skip many samples.
        if len(found) <= self._most_skipped or len({one.url for one in found}) == 1:
            return
        named = ", ".join(f"{one.url} ({one.reason})" for one in found[:_MAX_NAMED])
        raise TrainingError(
            f"{self._name}: {len(found):,} of {self._num_samples:,} samples could not be read so "
            f"far, more than the {self._most_skipped:,} that on_error='skip' leaves out, such as "
            f"{named}. Repair them."
        )


class Reporter:
    """Sums the metrics of steps over the ranks, a block of steps at a time, and emits events.

    `requests` maps a name to a function: does this rank request it? `requested` are the names that
    any rank had requested in the newest report: all ranks learn of them after the same step.
    `news` are events of threads. `last_step` and `last_validation` are the same on all ranks.
    """

    def __init__(self, world: World, emit: Callable[[Sequence[Event]], None]) -> None:
        self._world, self._emit = world, emit
        self.requests: dict[str, Callable[[], bool]] = {}
        self.requested: frozenset[str] = frozenset()
        self.news: list[Any] = []
        self.last_step: StepEvent | None = None
        self.last_validation: ValidationEvent | None = None
        self.sums = Sums(world, REPORT_EVERY_S, REPORT_EVERY)
        self._steps: list[dict[str, Any]] = []  # not begun to be summed: number, epoch, times
        self._begun: list[dict[str, Any]] = []
        self._newest: StepEvent | None = None  # that was reported
        self._skipped_here: list[Skipped] = []  # not begun to be counted
        self._skipped_begun: list[Skipped] = []
        self._counts = counts.snapshot()
        self._retried_for = self._read_by = ""
        self._dataset: Any = None  # the one that is trained on
        self._started = time.perf_counter()

    def begin_epoch(self, epoch: int, dataset: Dataset, options: TrainingOptions) -> None:
        self._dataset, self._epoch = dataset, Pass(f"epoch {epoch}", dataset, options)

    def add(
        self, step: int, epoch: int, lr: float, metrics: Sequence[BatchMetrics], share: Share
    ) -> None:
        one = metrics[0] if len(metrics) == 1 else _joined(metrics)
        counted = [one.num_correct, one.num_labeled, one.num_here]
        self.sums.add([(one.mean_loss, one.loss_count), *((number, 1) for number in counted)])
        self._skipped_here += share.skipped
        self._steps.append({"step": step, "epoch": epoch, "lr": lr, "elapsed_s": self.elapsed_s})

    def begin(self) -> None:
        """Waits for no rank and no device."""
        asked = [float(is_requested()) for is_requested in self.requests.values()]
        self.sums.begin(*asked, *self._read_here())
        self._begun, self._steps = self._steps, []

    def finish(self) -> list[StepEvent]:
        """Emit the steps whose sums were begun, and learn what is `requested`; waits for all ranks.

        Returns, on every rank, those steps in which the loss counted something: none does if all
        samples were skipped. Raises TrainingError, on every rank, if that are more than may be.
        """
        rows, tail = self.sums.finish()
        pairs = zip(self.requests, tail[:-_NUM_READ], strict=True)
        self.requested = frozenset(name for name, number in pairs if number)
        steps, counting = [], []
        for info, row in zip(self._begun, rows, strict=True):
            (total, count), (correct, _), (labeled, _), (num, _) = row
            loss = total / count if count else math.nan
            right = quotient(correct, labeled)
            steps.append(StepEvent(loss=loss, accuracy=right, num_samples=int(num), **info))
            counting += steps[-1:] if count else []
        self._begun, self._newest = [], steps[-1]
        self.emit(*steps)
        self.emit_news()
        self._emit_reads(self._epoch, tail[-_NUM_READ:], steps[-1].step, steps[-1].epoch)
        return counting

    def flush(self) -> list[StepEvent]:
        steps = self.finish() if self.sums.is_begun else []
        if self._steps:
            self.begin()
            steps += self.finish()
        return steps

    def show_last_step(self) -> None:
        """`last_step` is the newest that was reported: after steps that no clock decides."""
        self.last_step = self._newest or self.last_step

    def unreported(self) -> list[StepEvent]:
        """The steps that were not emitted: without loss (NaN), which is a sum over all ranks."""
        return [
            StepEvent(loss=math.nan, accuracy=None, num_samples=0, **info)
            for info in [*self._begun, *self._steps]
        ]

    def validated(
        self, step: int, epoch: int, found: Evaluation, dataset: Dataset, options: TrainingOptions
    ) -> ValidationEvent:
        """The event of a validation, from what the ranks' shares gave; the same on all ranks."""
        self._skipped_here += found.skipped
        here = torch.tensor(self._read_here(), dtype=torch.float64).to(self._world.device)
        validation = Pass(f"the validation after step {step}", dataset, options)
        self._emit_reads(validation, self._world.sum(here).tolist(), step, epoch)
        loss, accuracy, num, metrics = found.values()
        return ValidationEvent(step, epoch, loss, accuracy, num, self.elapsed_s, metrics)

    def _read_here(self) -> list[int]:
        """How many reads this rank has made again, and samples skipped, since the last call."""
        now = counts.snapshot()
        here, self._counts = now - self._counts, now
        self._retried_for = here.last_reason
        self._skipped_begun, self._skipped_here = self._skipped_here, []
        return [here.retries, len(self._skipped_begun)]

    def _emit_reads(self, of: Pass, sums: Sequence[float], step: int, epoch: int) -> None:
        num_retried, num_skipped = map(int, sums)
        new: list[Skipped] = []
        if num_skipped:
            new = [one for part in self._world.gather(self._skipped_begun) for one in part]
            of.add(new)
        before, self._read_by = self._read_by, loader.read_by(self._dataset)
        if any(sums) or self._read_by != before:
            about = num_retried, self._retried_for, num_skipped, dict(new), self._read_by
            self.emit(DataEvent(step, epoch, *about))

    def emit(self, *events: Event) -> None:
        if self._world.rank == 0:
            self._emit(events)

    def emit_news(self) -> None:
        while self.news:
            self.emit(self.news.pop(0))

    def emit_progress(self, one: Progress) -> None:
        self.emit(ProgressEvent(one.what, one.done, one.total or 0, one.unit, self.elapsed_s))

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def resume_time(self, elapsed_s: float) -> None:
        self._started = time.perf_counter() - elapsed_s


def _joined(parts: Sequence[BatchMetrics]) -> BatchMetrics:
    """Those of a step that was cut into micro-batches."""
    nums, means, counted, corrects, labeleds = zip(*parts, strict=True)
    mean = torch.stack(means).double()
    as_count = partial(torch.as_tensor, dtype=torch.float64, device=mean.device)
    count = torch.stack(list(map(as_count, counted)))
    # `where`, as 0 times NaN is NaN: the loss of a placeholder may be anything.
    total = torch.where(count > 0, mean * count, 0.0).sum()
    return BatchMetrics(sum(nums), total / count.sum(), count.sum(), sum(corrects), sum(labeleds))


# ---- the first event, and all so far -------------------------------------------------------------


def start_event(
    world: World,
    options: TrainingOptions,
    dataset: Dataset,
    steps_per_epoch: int,
    metrics: Sequence[str] | None,
) -> events.StartEvent:
    """`steps_per_epoch` is 0 of a stream; `metrics` are the names of those asked for, None without
    a validation. Where the ranks are, the client adds."""
    validates, every = metrics is not None, options.validate_every
    every_steps = every if isinstance(every, int) else steps_per_epoch or -1
    # torchvision's data sets are known by name: it need not be installed.
    are_images = all(
        isinstance(part, Datastore)
        or any(cls.__name__ == "VisionDataset" for cls in type(part).__mro__)
        for part in parts(dataset)
    )
    return events.StartEvent(
        num_epochs=options.epochs,
        steps_per_epoch=steps_per_epoch,
        num_samples=num_samples(dataset),
        batch_size=options.batch_size,
        world_size=world.size,
        device=devices.of(world.device).name,
        backend=world.backend,
        num_steps=total_steps(options, steps_per_epoch) or 0,
        objective=options.objective if validates else "",
        precision=options.precision,
        validate_every=every_steps if validates else 0,
        patience=options.patience or 0,
        keep=options.keep,
        started_at=time.time(),
        unit="images" if are_images else "samples",
        metrics=tuple(metrics or ()),
    )


class EventLog:
    """Passes events to `emit`, and keeps those of steps as rows of numbers: a million are 64 MB."""

    def __init__(self, emit: Callable[[Sequence[Event]], None]) -> None:
        self._emit = emit
        self._steps = array("d")
        self._others: list[tuple[int, dict[str, Any]]] = []  # and after how many steps it came

    def __call__(self, new: Sequence[Event]) -> None:
        for event in new:
            is_news = isinstance(event, DataEvent) and (event.num_skipped or event.num_retried)
            if isinstance(event, StepEvent):
                self._steps.extend(math.nan if one is None else one for one in _row(event))
            elif isinstance(event, _KEPT) or is_news:  # reads that went well are many events
                # As plain dicts: `torch.load(weights_only=True)` knows no classes of ours.
                self._others.append((len(self._steps) // _NUM_FIELDS, events.to_dict(event)))
        self._emit(new)

    def state(self) -> dict[str, Any]:
        steps = torch.from_numpy(np.array(self._steps)).view(-1, _NUM_FIELDS)
        return {"steps": steps, "others": list(self._others)}

    def replay(self, state: Mapping[str, Any]) -> None:
        steps, told, done = list[StepEvent](), list[Event](), 0
        for step, epoch, loss, right, lr, num, at_s in state["steps"].tolist():
            known = None if math.isnan(right) else right
            steps.append(StepEvent(int(step), int(epoch), loss, known, lr, int(num), at_s))
        for number, plain in state["others"]:
            told += [*steps[done:number], events.from_dict(plain)]
            done = number
        told += steps[done:]
        for first in range(0, len(told), _PART):
            self(told[first : first + _PART])
