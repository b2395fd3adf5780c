"""What training reports: sums over the ranks, a block of steps at a time. Runs on engines.

reporter.add(run.step, ...)        # in each step: loss and counts stay on the device
reporter.begin()                   # every 10 steps: one small all-reduce, begun
steps = reporter.finish()          # a step later: all ranks know the same from here on
steps = reporter.flush()           # both at once, where something depends on the steps
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import Progress
from gpupool.core.wire.events import Event, ProgressEvent, StepEvent, ValidationEvent
from gpupool.data.reading import loader
from gpupool.engine.batches.order import epoch_size
from gpupool.engine.batches.read_counts import NUM_READ, Pass, ReadCounts
from gpupool.engine.batches.share import Dataset, Share
from gpupool.engine.group.forming import World
from gpupool.engine.group.sums import Sums
from gpupool.engine.metrics.evaluation import Evaluation, quotient

REPORT_EVERY_S = 1.0
REPORT_EVERY = 10  # steps, where a second has more


class BatchMetrics(NamedTuple):
    """Loss and counts of a micro-batch: numbers, or tensors on the device that nobody has read.

    `loss_count`: over how much `mean_loss` is a mean. `num_correct` of `num_labeled` targets that
    have a class were found; 0 of 0 where there are none.
    """

    num_here: int
    mean_loss: Tensor
    loss_count: int | Tensor
    num_correct: int | Tensor = 0
    num_labeled: int | Tensor = 0


class Reporter:
    """Sums the metrics of steps over the ranks, a block of steps at a time, and emits events.

    `requests` maps a name to a function: does this rank request it? `requested` are the names that
    any rank had requested in the newest report: all ranks learn of them after the same step.
    `news` are lists of events, as threads find them; they are emitted with the reports. `last_step`
    and `last_validation` are the same on all ranks; `last_step` is the one that `show_last_step`
    found.
    """

    def __init__(self, world: World, emit: Callable[[Sequence[Event]], None]) -> None:
        self._world, self._emit = world, emit
        self.requests: dict[str, Callable[[], bool]] = {}
        self.requested: frozenset[str] = frozenset()
        self.news: list[list[Any]] = []
        self.last_step: StepEvent | None = None
        self.last_validation: ValidationEvent | None = None
        self.sums = Sums(world, REPORT_EVERY_S, REPORT_EVERY)
        self._steps: list[dict[str, Any]] = []  # not begun to be summed: number, epoch, times
        self._begun: list[dict[str, Any]] = []
        self._newest: StepEvent | None = None  # that was reported
        self._reads = ReadCounts(world)
        self._dataset: Dataset | None = None  # the one that is trained on
        self._started = time.perf_counter()

    # ---- steps ----------------------------------------------------------------------------------

    def add(
        self, step: int, epoch: int, lr: float, metrics: Sequence[BatchMetrics], share: Share
    ) -> None:
        """Note a step; nothing is read from the device yet."""
        one = metrics[0] if len(metrics) == 1 else _joined(metrics)
        counted = [one.num_correct, one.num_labeled, one.num_here]
        self.sums.add([(one.mean_loss, one.loss_count), *((number, 1) for number in counted)])
        self._reads.add_skipped(share.skipped)
        at_s, wait_s = self.elapsed_s, share.wait_s
        self._steps.append(
            {"step": step, "epoch": epoch, "lr": lr, "elapsed_s": at_s, "data_wait_s": wait_s}
        )

    def begin(self) -> None:
        """Begin to sum the noted steps over the ranks; this waits for no rank and no device."""
        asked = [float(is_requested()) for is_requested in self.requests.values()]
        self.sums.begin(*asked, *self._reads.numbers())
        self._begun, self._steps = self._steps, []

    def finish(self) -> list[StepEvent]:
        """Emit the steps whose sums were begun, and learn what is `requested`; waits for all ranks.

        Returns, on every rank, those steps in which the loss counted something. None does
        if all samples were skipped, or no pixel has a class.

        Raises TrainingError, on every rank, if more samples were skipped than is allowed.
        """
        rows, tail = self.sums.finish()
        pairs = zip(self.requests, tail[:-NUM_READ], strict=True)
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
        self._emit_reads(tail[-NUM_READ:], steps[-1].step, steps[-1].epoch)
        return counting

    def flush(self) -> list[StepEvent]:
        """Emit all noted steps; as `finish`."""
        steps = self.finish() if self.sums.is_begun else []
        if self._steps:
            self.begin()
            steps += self.finish()
        return steps

    def show_last_step(self) -> None:
        """`last_step` is the newest that was reported: after steps that no clock decides."""
        self.last_step = self._newest or self.last_step

    def unreported(self) -> list[StepEvent]:
        """The steps that were noted and not emitted: without loss (NaN), a sum over all ranks."""
        return [
            StepEvent(loss=math.nan, accuracy=None, num_samples=0, **info)
            for info in [*self._begun, *self._steps]
        ]

    # ---- passes over the data: epochs and validations -------------------------------------------

    def begin_epoch(self, epoch: int, dataset: Dataset, options: TrainingOptions) -> None:
        """An epoch begins, or resumes."""
        self._dataset, num = dataset, epoch_size(dataset)
        self._reads.now = Pass(f"epoch {epoch}", num, options.most_skipped(num))

    def begin_validation(self, step: int, dataset: Dataset, options: TrainingOptions) -> None:
        """A validation begins, in an epoch or after it."""
        self._training_pass, num = self._reads.now, epoch_size(dataset)
        name = f"the validation after step {step}"
        self._reads.now = Pass(name, num, options.most_skipped(num))

    def end_validation(self, step: int, epoch: int, found: Evaluation) -> ValidationEvent:
        """The event of a validation, from what the ranks' shares gave; the same on all ranks."""
        self._reads.add_skipped(found.skipped)
        numbers = torch.tensor(self._reads.numbers(), dtype=torch.float64)
        self._emit_reads(self._world.sum(numbers.to(self._world.device)).tolist(), step, epoch)
        self._reads.now = self._training_pass
        loss, accuracy, num, metrics = found.values()
        return ValidationEvent(step, epoch, loss, accuracy, num, self.elapsed_s, metrics)

    def _emit_reads(self, sums: Sequence[float], step: int, epoch: int) -> None:
        read_by = "" if self._dataset is None else loader.read_by(self._dataset)
        news = self._reads.add_sums(sums, step, epoch, read_by)
        if news is not None:
            self.emit(news)

    # ---- events and time ------------------------------------------------------------------------

    def emit(self, *events: Event) -> None:
        """Emit these events, on the first rank."""
        if self._world.rank == 0:
            self._emit(events)

    def emit_news(self) -> None:
        """Emit what threads have found since the last report."""
        for found in self.news:
            while found:
                self.emit(found.pop(0))

    def emit_progress(self, one: Progress) -> None:
        """Emit how far something beside the steps is, with the seconds of training so far."""
        self.emit(ProgressEvent(one.what, one.done, one.total or 0, one.unit, self.elapsed_s))

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far."""
        return time.perf_counter() - self._started

    def resume_time(self, elapsed_s: float) -> None:
        """So many seconds of training have passed before a resume."""
        self._started = time.perf_counter() - elapsed_s


def _joined(metrics: Sequence[BatchMetrics]) -> BatchMetrics:
    """Those of a step that was cut into micro-batches."""
    total = torch.zeros((), dtype=torch.float64, device=metrics[0].mean_loss.device)
    count = torch.zeros_like(total)
    for one in metrics:
        counts = torch.as_tensor(one.loss_count, dtype=torch.float64, device=total.device)
        # `where`, as 0 times NaN is NaN: the loss of a placeholder may be anything.
        total += torch.where(counts > 0, one.mean_loss * counts, 0.0)
        count += counts
    nums, _, _, corrects, labeleds = zip(*metrics, strict=True)
    return BatchMetrics(sum(nums), total / count, count, sum(corrects), sum(labeleds))
