"""What training reports: sums over the ranks, a block of steps at a time. Runs on engines.

batch_metrics(...)         each step leaves loss and counts on the device; none is read
reporter.add(...)          notes them with the step
reporter.send()            every few steps: one small all-reduce for all of them, begun
reporter.receive()         a step later: its result, read from the device, becomes events
reporter.flush()           both at once, also where a second is over since the last report
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpupool.core.options.datasets import is_stream
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import Course
from gpupool.core.wire.events import (
    EndEvent,
    Event,
    ProgressEvent,
    StepEvent,
    ValidationEvent,
)
from gpupool.data.reading import loader
from gpupool.engine.batches.order import epoch_size
from gpupool.engine.batches.read_counts import NUM_READ, Pass, ReadCounts
from gpupool.engine.batches.share import Dataset, Share, num_samples
from gpupool.engine.group.forming import World
from gpupool.engine.metrics.evaluation import (
    NUM_SUMS,
    Evaluation,
    accuracy,
    count_correct,
    mean_loss,
)
from gpupool.engine.numerics.losses import Loss

REPORT_EVERY_S = 1.0
_MOST_STEPS = 10**6  # between two reports


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


def batch_metrics(
    loss: Loss,
    mean_loss: Tensor,
    loss_count: int | Tensor,
    outputs: Any,
    targets: Any,
    num_here: int,
) -> BatchMetrics:
    """What a report needs of a micro-batch, without reading from the device.

    See `count_correct` for what has an accuracy.
    """
    counts = count_correct(loss, outputs, targets, num_here) if num_here else None
    correct, labeled = counts or (0, 0)
    return BatchMetrics(num_here, mean_loss.detach(), loss_count, correct, labeled)


class Reporter:
    """Sums the metrics of steps over the ranks, a block of steps at a time, and emits events.

    One small all-reduce for a block costs less than one for each step, and it is received a step
    later, so that ranks and devices work meanwhile. Requests, such as to stop, travel in the same
    all-reduce, so that all ranks learn of them after the same step.

    `requests` maps a name to a function: does this rank request it? `requested` are the names that
    any rank had requested when the last sums were sent. `last_step` and `last_validation` are the
    same on all ranks. `last_step` is the one that `show_last_step` found.
    """

    def __init__(
        self,
        world: World,
        emit: Callable[[Sequence[Event]], None],
        requests: Mapping[str, Callable[[], bool]] | None = None,
    ) -> None:
        self._world, self._emit = world, emit
        self.requests = dict(requests or {})
        self.requested: frozenset[str] = frozenset()
        self.last_step: StepEvent | None = None
        self._received: StepEvent | None = None  # the newest
        self.last_validation: ValidationEvent | None = None
        self._metrics: list[Sequence[BatchMetrics]] = []  # of the steps since the last `send`
        self._step_info: list[dict[str, Any]] = []  # of the same steps: number, epoch, times
        self._sending: Callable[[], list[float]] | None = None
        self._sent: list[dict[str, Any]] = []
        self._sent_s: float | None = None  # when the last step that was sent was over
        self._steps_a_second = 1  # as the first rank has measured them: the same on all ranks
        self._reads = ReadCounts(world)
        self._num_counted = 0
        self._dataset: Dataset | None = None  # the one that is trained on
        self._started = time.perf_counter()

    # ---- steps ----------------------------------------------------------------------------------

    def add(
        self, step: int, epoch: int, lr: float, metrics: Sequence[BatchMetrics], share: Share
    ) -> None:
        """Note a step; nothing is read from the device yet."""
        self._metrics.append(metrics)
        self._reads.add_skipped(share.skipped)
        self._step_info.append(
            {
                "step": step,
                "epoch": epoch,
                "lr": lr,
                "elapsed_s": self.elapsed_s,
                "data_wait_s": share.wait_s,
            }
        )

    @property
    def is_sending(self) -> bool:
        """Whether there are sums to `receive`."""
        return self._sending is not None

    @property
    def is_due(self) -> bool:
        """Whether a second is over since the last report, on every rank alike.

        Clocks of ranks differ. So the first rank says in each report how many steps take a second,
        and no step needs a collective for it. Only a rank that is alone asks its clock.
        """
        if len(self._step_info) >= self._steps_a_second:
            return True
        if self._world.size > 1 or self._sent_s is None:
            return False
        return bool(self._step_info[-1]["elapsed_s"] - self._sent_s >= REPORT_EVERY_S)

    def send(self) -> None:
        """Begin to sum the noted steps over the ranks; this waits for no rank and no device.

        Every rank calls `receive` next.
        """
        requests = [float(is_requested()) for is_requested in self.requests.values()]
        rest = [self._measured_steps(), *self._reads.numbers()]
        tail = torch.tensor([*requests, *rest], dtype=torch.float64)
        rows = _per_step(self._metrics, self._world.device)
        block = torch.cat([rows.view(-1), tail.to(self._world.device, non_blocking=True)])
        self._sending = self._world.sum_later(block)
        self._sent, self._step_info, self._metrics = self._step_info, [], []
        self._sent_s = self._sent[-1]["elapsed_s"]

    def _measured_steps(self) -> int:
        """How many steps take a second: the first rank says, the others add 0 to it."""
        if self._world.rank != 0:
            return 0
        if self._sent_s is None:  # the first step sets things up, and says nothing of the others
            return 1
        ends = [self._sent_s, *(info["elapsed_s"] for info in self._step_info)]
        # The longest, so that steps that have just become slow are seen soon.
        longest_s = max(end - begin for begin, end in pairwise(ends))
        return min(max(1, int(REPORT_EVERY_S / max(longest_s, 1e-9))), _MOST_STEPS)

    def receive(self) -> list[StepEvent]:
        """Emit the steps whose sums were sent, and learn what is `requested`.

        Returns, on every rank, those steps in which the loss counted something. None does
        if all samples were skipped, or no pixel has a class.

        Raises TrainingError, on every rank, if more samples were skipped than is allowed.
        """
        assert self._sending is not None
        numbers = self._sending()
        num = len(self._sent)
        rows = [numbers[i * NUM_SUMS : (i + 1) * NUM_SUMS] for i in range(num)]
        *requests, steps_a_second = numbers[num * NUM_SUMS : -NUM_READ]
        read = numbers[-NUM_READ:]
        steps = [self._event(row, info) for row, info in zip(rows, self._sent, strict=True)]
        self._sending, self._sent, self._steps_a_second = None, [], int(steps_a_second)
        self._num_counted += sum(one.num_samples for one in steps)
        self.requested = frozenset(
            name for name, number in zip(self.requests, requests, strict=True) if number > 0
        )
        self._received = steps[-1]
        self.emit(*steps)
        self._emit_reads(read, steps[-1].step, steps[-1].epoch)
        return [step for step, (_, count, *_) in zip(steps, rows, strict=True) if count]

    def flush(self) -> list[StepEvent]:
        """Emit all noted steps, and wait for their sums; as `receive`."""
        steps = self.receive() if self.is_sending else []
        if self._step_info:
            self.send()
            steps += self.receive()
        return steps

    def show_last_step(self) -> None:
        """`last_step` is the newest that was received: after steps that no clock decides."""
        self.last_step = self._received or self.last_step

    def unreported(self) -> list[StepEvent]:
        """The steps that were noted and not emitted: without loss (NaN), a sum over all ranks."""
        return [
            StepEvent(loss=math.nan, accuracy=None, num_samples=0, **info)
            for info in [*self._sent, *self._step_info]
        ]

    def _event(self, row: Sequence[float], info: dict[str, Any]) -> StepEvent:
        total, count, num_correct, num_labeled, num = row
        loss, share = mean_loss(total, count), accuracy(num_correct, num_labeled)
        return StepEvent(loss=loss, accuracy=share, num_samples=int(num), **info)

    # ---- passes over the data: epochs and validations -------------------------------------------

    def begin_epoch(
        self, epoch: int, dataset: Dataset, options: TrainingOptions, samples_done: int = 0
    ) -> None:
        """An epoch begins, or resumes after `samples_done` of its samples."""
        self._num_counted = 0
        self._dataset = dataset
        num = epoch_size(dataset)
        self._begin_pass(f"epoch {epoch}", num - samples_done if num else 0, num, options)

    def end_epoch(self) -> None:
        """An epoch is over: each sample was trained on, or skipped, once.

        Raises TrainingError if not.
        """
        self._reads.now.check_complete(self._num_counted)

    def begin_validation(self, step: int, dataset: Dataset, options: TrainingOptions) -> None:
        """A validation begins, in an epoch or after it."""
        self._training_pass = self._reads.now
        # of a stream its len(), if it has one, may be a guess
        num = 0 if is_stream(dataset) else num_samples(dataset)
        self._begin_pass(f"the validation after step {step}", num, num, options)

    def end_validation(
        self, step: int, epoch: int, found: Evaluation, metrics: dict[str, float]
    ) -> ValidationEvent:
        """The event of a validation, from what this rank's shares gave; the same on all ranks.

        Raises TrainingError, on every rank, if not each sample was counted once.
        """
        self._reads.add_skipped(found.skipped)
        tail = torch.tensor(self._reads.numbers(), dtype=torch.float64).to(found.sums.device)
        numbers = self._world.sum(torch.cat([found.sums, tail])).tolist()
        total, count, num_correct, num_labeled, num = numbers[:-NUM_READ]
        self._emit_reads(numbers[-NUM_READ:], step, epoch)
        self._reads.now.check_complete(int(num))
        self._reads.now = self._training_pass
        loss, share = mean_loss(total, count), accuracy(num_correct, num_labeled)
        return ValidationEvent(step, epoch, loss, share, int(num), self.elapsed_s, metrics)

    def emit_validation(self, event: ValidationEvent) -> None:
        """Emit a validation; it is `last_validation` now."""
        self.last_validation = event
        self.emit(event)

    def _begin_pass(self, name: str, num_left: int, num_all: int, options: TrainingOptions) -> None:
        self._reads.now = Pass(name, num_left, options.most_skipped(num_all))

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

    def emit_progress(self, course: Course) -> None:
        """Emit how far something beside the steps is, with the seconds of training so far."""
        total = course.total or 0
        self.emit(ProgressEvent(course.what, course.done, total, course.unit, self.elapsed_s))

    def emit_end(self, step: int, stopped_by: str, kept_step: int = -1) -> None:
        """Emit the last event."""
        self.emit(EndEvent(stopped_by, step, self.elapsed_s, kept_step))

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far."""
        return time.perf_counter() - self._started

    def resume_time(self, elapsed_s: float) -> None:
        """So many seconds of training have passed before a resume."""
        self._started = time.perf_counter() - elapsed_s


# ---- a table of steps: a row has what the `sums` of an `Evaluation` have -------------------------


def _per_step(steps: Sequence[Sequence[BatchMetrics]], device: torch.device) -> Tensor:
    """A row for each step: the sum over its micro-batches. Shape (steps, `NUM_SUMS`), float64."""
    every = [one for step in steps for one in step]
    rows = _table(every, device)
    if len(every) == len(steps):
        return rows
    of_step = [i for i, step in enumerate(steps) for _ in step]
    index = torch.tensor(of_step).to(rows.device, non_blocking=True)
    return rows.new_zeros(len(steps), rows.shape[1]).index_add_(0, index, rows)


def _table(metrics: Sequence[BatchMetrics], device: torch.device) -> Tensor:
    """A row for each micro-batch, on the device. One that counts nothing adds nothing."""
    loss_counts = _column([one.loss_count for one in metrics], device)
    means = torch.stack([one.mean_loss for one in metrics]).to(torch.float64)
    columns = [
        # `where`, as 0 times NaN is NaN: the loss of a placeholder may be anything.
        (means * loss_counts).where(loss_counts > 0, 0),
        loss_counts,
        _column([one.num_correct for one in metrics], device),
        _column([one.num_labeled for one in metrics], device),
        _column([one.num_here for one in metrics], device),
    ]
    return torch.stack(columns, 1)


def _column(values: Sequence[int | Tensor], device: torch.device) -> Tensor:
    """As float64 on the device: one copy of those that are numbers, one stack of the others."""
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack(list(values)).to(torch.float64)  # type: ignore[arg-type]
    if not any(isinstance(value, Tensor) for value in values):
        return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)
    return torch.stack(
        [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
    )
