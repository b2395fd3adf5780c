"""A training to draw, without engines: plausible events, and a run that reports them.

Tests use it directly and from the cells of the notebooks that they execute.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from gpupool.core.wire.events import (
    EndEvent,
    Event,
    RankEvent,
    StartEvent,
    StepEvent,
    ValidationEvent,
)
from gpupool.training.history import TrainingHistory


def history_of(events: Iterable[Event], **options: str) -> TrainingHistory:
    history = TrainingHistory(options=options)
    for event in events:
        history.add(event)
    return history


def full_events(
    num_epochs: int = 6, steps_per_epoch: int = 150, num_ranks: int = 4, num_steps: int = 0
) -> Iterator[Event]:
    """The events of a training that goes well, with all that can be told: the best, patience, how
    each rank fares; without an end if `num_steps` cuts it short."""
    noise, total = random.Random(0), num_epochs * steps_per_epoch
    elapsed_s, best = 0.0, math.inf
    yield StartEvent(
        num_epochs, steps_per_epoch, steps_per_epoch * 512, 128 * num_ranks, num_ranks,
        "NVIDIA H200", "nccl", objective="loss", precision="bf16", patience=5, keep="best",
        devices=tuple(f"cuda:{n} NVIDIA H200" for n in range(num_ranks)),
        ranks=tuple(range(num_ranks)), validate_every=steps_per_epoch, started_at=1.8e9,
        unit="images",
    )  # fmt: skip
    for step in range(1, (num_steps or total) + 1):
        epoch = (step - 1) // steps_per_epoch + 1
        loss = 2.3 * math.exp(-5 * step / total) + 0.2 + noise.uniform(-0.1, 0.1)
        accuracy = 0.9 * (1 - math.exp(-6 * step / total))
        noisy = min(1.0, max(0.0, accuracy + noise.uniform(-0.05, 0.05)))
        elapsed_s += 0.0125
        yield StepEvent(step, epoch, loss, noisy, 0.1, 512, elapsed_s)
        if step % 20 == 1:
            yield from rank_events(num_ranks, step)
        if step % steps_per_epoch == 0:
            elapsed_s += 0.5
            loss += 0.02 if epoch < num_epochs - 1 else 0.22
            yield ValidationEvent(step, epoch, loss, accuracy, 5000, elapsed_s, is_best=loss < best)
            best = min(best, loss)
    if not num_steps:
        yield EndEvent("epochs", total, elapsed_s)


def rank_events(num_ranks: int, step: int) -> Iterator[RankEvent]:
    """How each rank fares; the third is slow."""
    for rank in range(num_ranks):
        slow = rank == 2
        busy = 0.71 if slow else 0.95 + 0.01 * (step // 20 % 3)
        work_s = 0.071 if slow else 0.052
        yield RankEvent(rank, step, work_s, 0.071, busy, 57 << 30, 139 << 30, 58 + rank % 4)


class Run:
    """What `show_training` needs of a run: a thread feeds it as engines would.

    One that does not end of itself stands still after `num_steps` until it is stopped.
    """

    def __init__(self, step_s: float = 0.001, ends: bool = True, **training: int) -> None:
        self.history = TrainingHistory()
        self._stopped = threading.Event()
        self._listeners: list[Callable[[TrainingHistory], None]] = []
        feeding = (step_s, ends, training)
        self._thread = threading.Thread(target=self._feed, args=feeding, daemon=True)

    def add_listener(self, listener: Callable[[TrainingHistory], None]) -> None:
        self._listeners.append(listener)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def wait(self) -> None:
        self._thread.join()

    def _feed(self, step_s: float, ends: bool, training: dict[str, int]) -> None:
        for event in full_events(**training):
            if self._stopped.is_set():
                break
            self.history.add(event)
            self._report()
            time.sleep(step_s)
        if not ends:
            self._stopped.wait()
        if self._stopped.is_set() and not self.history.is_over:
            self.history.add(EndEvent("user", len(self.history.steps), self.history.elapsed_s))
            self._report()

    def _report(self) -> None:
        for listener in self._listeners:
            listener(self.history)
