"""What training reports: sums over the ranks, a block of steps at a time. Runs on engines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpupool.core.options.datasets import is_stream
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import Course
from gpupool.core.wire.events import EndEvent, Event, ProgressEvent, StepEvent, ValidationEvent
from gpupool.engine.batches.share import Dataset, Share, num_samples
from gpupool.engine.group.forming import World
from gpupool.engine.metrics.evaluation import Evaluation, accuracy, mean_loss
from gpupool.engine.training.read_counts import NUM_READ, Reads
from gpupool.engine.training.step_sums import Measured, table, width


class Ledger:
    """Sums what happened in each step over the ranks, a block of steps at a time, and reports it.

    One small all-reduce for a block costs less than one for each step, and none of the numbers is
    read from the device before. The sums are sent for, and received a step later, so that ranks and
    devices go on meanwhile. Wishes, such as to stop, travel in the same all-reduce, so that all
    ranks learn of them after the same step.

    `wishes` maps a name to what tells whether this rank has it; `agreed` are the names of those
    that any rank had when the last sums were sent for. `last_step` and `last_validation` are the
    same on all.
    """

    def __init__(
        self,
        world: World,
        emit: Callable[[Sequence[Event]], None],
        wishes: Mapping[str, Callable[[], bool]] | None = None,
        num_terms: int = 1,
    ) -> None:
        self._world, self._emit, self._num_terms = world, emit, num_terms
        self.wishes = dict(wishes or {})
        self.agreed: frozenset[str] = frozenset()
        self.last_step: StepEvent | None = None
        self.last_validation: ValidationEvent | None = None
        self.num_classes = 0
        """Of the outputs of the last step; 0 where there are no classes."""
        self._measured: list[Sequence[Measured]] = []
        self._facts: list[dict[str, Any]] = []
        self._sending: Callable[[], list[float]] | None = None
        self._sent: list[dict[str, Any]] = []
        self._reads = Reads(world)
        self._num_counted = 0
        self._started = time.perf_counter()

    def begin_epoch(
        self, epoch: int, dataset: Dataset, options: TrainingOptions, samples_done: int = 0
    ) -> None:
        """An epoch begins, or goes on after `samples_done` of its samples."""
        self._num_counted = 0
        self._begin(f"epoch {epoch}", dataset, options, samples_done)

    def end_epoch(self) -> None:
        """An epoch is over: each sample was trained on, or skipped, once.

        Raises TrainingError if not.
        """
        self._reads.check_complete(self._num_counted)

    def add(
        self, step: int, epoch: int, lr: float, measured: Sequence[Measured], share: Share
    ) -> None:
        """Note a step and what was measured of it; nothing is read from the device yet."""
        self._measured.append(measured)
        self._reads.note(share.skipped)
        self._facts.append(
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

    def send(self) -> None:
        """Begin to sum the noted steps over the ranks; no rank waits for another one, nor a device.

        Every rank calls `receive` next.
        """
        wished = [float(wish()) for wish in self.wishes.values()]
        tail = torch.tensor([*wished, *self._reads.numbers()], dtype=torch.float64)
        block = torch.cat([self._rows().view(-1), tail.to(self._world.device, non_blocking=True)])
        self.num_classes = self._measured[-1][-1].num_classes
        self._sending = self._world.sum_later(block)
        self._sent, self._facts, self._measured = self._facts, [], []

    def receive(self) -> list[StepEvent]:
        """Report the steps whose sums were sent for, and learn what is agreed.

        Gives those steps that counted something, on every rank: not where all samples were skipped,
        or no pixel has a class. Raises TrainingError, on every rank, if more samples were skipped
        than is allowed.
        """
        assert self._sending is not None
        numbers = self._sending()
        size, num = width(self._num_terms), len(self._sent)
        rows = [numbers[i * size : (i + 1) * size] for i in range(num)]
        wanted, read = numbers[num * size : -NUM_READ], numbers[-NUM_READ:]
        steps = [self._event(row, facts) for row, facts in zip(rows, self._sent, strict=True)]
        self._sending, self._sent = None, []
        self._num_counted += sum(one.num_samples for one in steps)
        self.agreed = frozenset(
            name for name, number in zip(self.wishes, wanted, strict=True) if number > 0
        )
        self.last_step = steps[-1]
        self.tell(*steps)
        self._settle(read, self.last_step.step, self.last_step.epoch)
        counted = slice(self._num_terms, 2 * self._num_terms)
        return [step for step, row in zip(steps, rows, strict=True) if all(row[counted])]

    def flush(self) -> list[StepEvent]:
        """Report all steps that were noted, and wait for it; as `receive`."""
        steps = self.receive() if self.is_sending else []
        if self._facts:
            self.send()
            steps += self.receive()
        return steps

    def begin_validation(self, step: int, dataset: Dataset, options: TrainingOptions) -> None:
        """A validation begins, in an epoch or after it."""
        self._training_pass = self._reads.pause()
        self._begin(f"the validation after step {step}", dataset, options)

    def end_validation(
        self, step: int, epoch: int, found: Evaluation, metrics: dict[str, float]
    ) -> ValidationEvent:
        """What is to be told of a validation, from what this rank's shares gave; the same on all.

        Raises TrainingError, on every rank, if not each sample was counted once.
        """
        self._reads.note(found.skipped)
        tail = torch.tensor(self._reads.numbers(), dtype=torch.float64).to(found.sums.device)
        numbers = self._world.sum(torch.cat([found.sums, tail])).tolist()
        *of_loss, right, classed, num = numbers[:-NUM_READ]
        self._settle(numbers[-NUM_READ:], step, epoch)
        self._reads.check_complete(int(num))
        self._reads.go_on(self._training_pass)
        loss, share = mean_loss(of_loss, self._num_terms), accuracy(right, classed)
        return ValidationEvent(step, epoch, loss, share, int(num), self.elapsed_s, metrics)

    def validated(self, event: ValidationEvent) -> None:
        """Report a validation."""
        self.last_validation = event
        self.tell(event)

    def end(self, step: int, stopped_by: str, kept_step: int = -1) -> None:
        """Report the end."""
        self.tell(EndEvent(stopped_by, step, self.elapsed_s, kept_step))

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far."""
        return time.perf_counter() - self._started

    def go_on(self, elapsed_s: float) -> None:
        """So many seconds of training have passed before."""
        self._started = time.perf_counter() - elapsed_s

    def unreported(self) -> list[StepEvent]:
        """The steps noted, and not reported: without loss (NaN), as only all ranks know it."""
        return [
            StepEvent(loss=math.nan, accuracy=None, num_samples=0, **facts)
            for facts in [*self._sent, *self._facts]
        ]

    def tell(self, *events: Event) -> None:
        """Report these events, on the first rank."""
        if self._world.rank == 0:
            self._emit(events)

    def tell_aside(self, course: Course) -> None:
        """Report how far something beside the steps is, and that the time goes on meanwhile."""
        total = course.total or 0
        self.tell(ProgressEvent(course.what, course.done, total, course.unit, self.elapsed_s))

    def _rows(self) -> Tensor:
        """The noted steps of this rank as rows of `table`."""
        every = [one for step in self._measured for one in step]
        rows = table(every, self._num_terms, self._world.device)
        if len(every) == len(self._measured):
            return rows
        of_step = [i for i, step in enumerate(self._measured) for _ in step]
        index = torch.tensor(of_step).to(rows.device, non_blocking=True)
        return rows.new_zeros(len(self._measured), rows.shape[1]).index_add_(0, index, rows)

    def _event(self, row: Sequence[float], facts: dict[str, Any]) -> StepEvent:
        *of_loss, right, classed, num = row
        loss, share = mean_loss(of_loss, self._num_terms), accuracy(right, classed)
        return StepEvent(loss=loss, accuracy=share, num_samples=int(num), **facts)

    def _begin(
        self, name: str, dataset: Dataset, options: TrainingOptions, samples_done: int = 0
    ) -> None:
        if is_stream(dataset):  # its len(), if it has one, may be a guess
            self._reads.begin(name, 0, options.most_skipped(0))
            return
        num = num_samples(dataset)
        self._reads.begin(name, num - samples_done, options.most_skipped(num))

    def _settle(self, read: Sequence[float], step: int, epoch: int) -> None:
        news = self._reads.settle(read, step, epoch)
        if news is not None:
            self.tell(news)
