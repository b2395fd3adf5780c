"""What training reports: sums over the ranks, a block of steps at a time. Runs on engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpupool.core.events import EndEvent, Event, StartEvent, StepEvent, ValidationEvent
from gpupool.core.options import TrainingOptions
from gpupool.engine.batches import Dataset, Share
from gpupool.engine.group import World


def measure(mean_loss: Tensor, outputs: Any, share: Share) -> Tensor:
    """[loss sum, correct, samples with a class, samples] of one share, on its device.

    Outputs of shape (N, classes) with integer targets of shape (N,) have an accuracy.
    """
    numbers = torch.zeros(4, dtype=torch.float64, device=share.targets.device)
    targets = share.targets
    if not share.num_here:
        return numbers
    numbers[0] = mean_loss.detach() * share.num_here
    is_class = targets.ndim == 1 and not targets.is_floating_point()
    if is_class and isinstance(outputs, Tensor) and outputs.ndim == 2:
        numbers[1] = (outputs.detach().argmax(1) == targets).sum()
        numbers[2] = share.num_here
    numbers[3] = share.num_here
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

    def add(
        self, step: int, epoch: int, lr: float, mean_loss: Tensor, outputs: Any, share: Share
    ) -> None:
        """Note a step; nothing is read from the device yet."""
        self._rows.append(measure(mean_loss, outputs, share))
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
        """Sum the noted steps over the ranks, report them, and agree on whether to stop."""
        wish = torch.full((1, 4), float(self._stop_requested()), dtype=torch.float64)
        block = torch.cat([torch.stack(self._rows), wish.to(self._world.device)])
        *rows, agreed = self._world.sum(block).tolist()
        events = [
            StepEvent(
                loss=row[0] / row[3], accuracy=_accuracy(row), num_samples=int(row[3]), **facts
            )
            for row, facts in zip(rows, self._facts, strict=True)
        ]
        self._tell(*events)
        self._rows, self._facts = [], []
        self.stopped = agreed[0] > 0

    def validation(self, step: int, epoch: int, totals: Tensor) -> None:
        """Report the validation after an epoch."""
        row = totals.tolist()
        self._tell(
            ValidationEvent(
                step, epoch, row[0] / row[3], _accuracy(row), int(row[3]), self._elapsed_s()
            )
        )

    def end(self, step: int) -> None:
        """Report the end."""
        self._tell(EndEvent("user" if self.stopped else "epochs", step, self._elapsed_s()))

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def _tell(self, *events: Event) -> None:
        if self._world.rank == 0:
            self._emit(events)


def _accuracy(row: Sequence[float]) -> float | None:
    return row[1] / row[2] if row[2] else None
