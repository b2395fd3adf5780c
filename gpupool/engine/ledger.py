"""What training reports: sums over the ranks, a block of steps at a time. Runs on engines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpupool.core.events import EndEvent, Event, StartEvent, StepEvent, ValidationEvent
from gpupool.core.options import TrainingOptions
from gpupool.data.samples import Skipped
from gpupool.engine.batches import Dataset, Share
from gpupool.engine.group import World
from gpupool.engine.reads import Reads

NUM_MEASURED = 5


def measure(mean_loss: Tensor, num_counted: int | Tensor, outputs: Any, share: Share) -> Tensor:
    """[loss sum, over how much, correct, samples with a class, samples] of a share, on its device.

    Outputs of shape (N, classes) with integer targets of shape (N,) have an accuracy.
    """
    numbers = torch.zeros(NUM_MEASURED, dtype=torch.float64, device=share.targets.device)
    targets = share.targets
    if not share.num_here:
        return numbers
    numbers[0] = mean_loss.detach() * num_counted
    numbers[1] = num_counted
    is_class = targets.ndim == 1 and not targets.is_floating_point()
    if is_class and isinstance(outputs, Tensor) and outputs.ndim == 2:
        numbers[2] = (outputs.detach().argmax(1) == targets).sum()
        numbers[3] = share.num_here
    numbers[4] = share.num_here
    return numbers


class Ledger:
    """Sums what happened in each step over the ranks, a block of steps at a time, and reports it.

    One small all-reduce for a block costs less than one for each step, and none of the numbers is
    read from the device before. The wish to stop travels in the same all-reduce, so that all ranks
    learn of it after the same step.
    """

    def __init__(
        self,
        world: World,
        emit: Callable[[Sequence[Event]], None],
        stop_requested: Callable[[], bool],
    ) -> None:
        self._world, self._emit, self._stop_requested = world, emit, stop_requested
        self._rows: list[Tensor] = []
        self._facts: list[dict[str, Any]] = []
        self._reads = Reads(world)
        self._num_counted = 0
        self._started = time.perf_counter()
        self.stopped = False

    def start(self, dataset: Dataset, options: TrainingOptions, steps_per_epoch: int) -> None:
        """Tell what is about to be done."""
        device = self._world.device
        self._tell(
            StartEvent(
                num_epochs=options.epochs,
                steps_per_epoch=steps_per_epoch,
                num_samples=len(dataset),
                batch_size=options.batch_size,
                world_size=self._world.size,
                device=torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
                backend=self._world.backend,
            )
        )

    def begin_epoch(self, epoch: int, dataset: Dataset, options: TrainingOptions) -> None:
        """An epoch begins."""
        self._num_counted = 0
        num_samples = len(dataset)
        self._reads.begin(f"epoch {epoch}", num_samples, options.most_skipped(num_samples))

    def end_epoch(self) -> None:
        """An epoch is over: each sample was trained on, or skipped, once.

        Raises TrainingError if not.
        """
        self._reads.check_complete(self._num_counted)

    def add(self, step: int, epoch: int, lr: float, measured: Tensor, share: Share) -> None:
        """Note a step and what `measure` gave; nothing is read from the device yet."""
        self._rows.append(measured)
        self._reads.note(share.skipped)
        self._facts.append(
            {
                "step": step,
                "epoch": epoch,
                "lr": lr,
                "elapsed_s": self._elapsed_s(),
                "data_wait_s": share.wait_s,
            }
        )

    def flush(self) -> None:
        """Sum the noted steps over the ranks, report them, and agree on whether to stop.

        Raises TrainingError, on every rank, if more samples were skipped than is allowed.
        """
        wish = torch.full((1, NUM_MEASURED), float(self._stop_requested()), dtype=torch.float64)
        tail = torch.cat([wish, self._read_numbers()])
        block = torch.cat([torch.stack(self._rows), tail.to(self._world.device)])
        *rows, agreed, read = self._world.sum(block).tolist()
        events: list[Event] = [
            StepEvent(
                loss=_mean_loss(row), accuracy=_accuracy(row), num_samples=int(row[4]), **facts
            )
            for row, facts in zip(rows, self._facts, strict=True)
        ]
        self._num_counted += sum(int(row[4]) for row in rows)
        last = self._facts[-1]
        self._rows, self._facts = [], []
        self.stopped = agreed[0] > 0
        self._tell(*events)
        self._settle(read, last["step"], last["epoch"])

    def begin_validation(self, epoch: int, dataset: Dataset, options: TrainingOptions) -> None:
        """The validation after an epoch begins."""
        name, num_samples = f"the validation after epoch {epoch}", len(dataset)
        self._reads.begin(name, num_samples, options.most_skipped(num_samples))

    def validation(self, step: int, epoch: int, totals: Tensor, skipped: Sequence[Skipped]) -> None:
        """Report the validation after an epoch, from the totals and skipped samples of this rank.

        Raises TrainingError, on every rank, if not each sample was counted once.
        """
        self._reads.note(skipped)
        block = torch.stack([totals, self._read_numbers()[0].to(totals.device)])
        row, read = self._world.sum(block).tolist()
        self._settle(read, step, epoch)
        self._reads.check_complete(int(row[4]))
        self._tell(
            ValidationEvent(
                step, epoch, _mean_loss(row), _accuracy(row), int(row[4]), self._elapsed_s()
            )
        )

    def end(self, step: int) -> None:
        """Report the end."""
        self._tell(EndEvent("user" if self.stopped else "epochs", step, self._elapsed_s()))

    def _read_numbers(self) -> Tensor:
        """What `Reads` tells, as wide as a row of `measure`."""
        return functional.pad(self._reads.numbers(), (0, 1))

    def _settle(self, read: Sequence[float], step: int, epoch: int) -> None:
        news = self._reads.settle(read, step, epoch)
        if news is not None:
            self._tell(news)

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def _tell(self, *events: Event) -> None:
        if self._world.rank == 0:
            self._emit(events)


def _mean_loss(row: Sequence[float]) -> float:
    """NaN where all samples were skipped, or no pixel has a class."""
    return row[0] / row[1] if row[1] else math.nan


def _accuracy(row: Sequence[float]) -> float | None:
    return row[2] / row[3] if row[3] else None
