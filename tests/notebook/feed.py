"""A training to draw, without engines: plausible events, and a run that reports them.

Tests use it directly and from the cells of the notebooks that they execute.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator

from gpupool.core.events import EndEvent, Event, StartEvent, StepEvent, ValidationEvent
from gpupool.training.history import TrainingHistory


def training_events(
    num_epochs: int = 6,
    steps_per_epoch: int = 150,
    num_steps: int | None = None,
    with_accuracy: bool = True,
    spike_at: int | None = None,
) -> Iterator[Event]:
    """The events of a training that goes well; without an end if `num_steps` cuts it short."""
    noise, total = random.Random(0), num_epochs * steps_per_epoch
    elapsed_s = 0.0
    yield StartEvent(num_epochs, steps_per_epoch, steps_per_epoch * 512, 512, 4, "cuda", "nccl")
    for step in range(1, (num_steps or total) + 1):
        epoch = (step - 1) // steps_per_epoch + 1
        loss = 2.3 * math.exp(-5 * step / total) + 0.2 + noise.uniform(-0.1, 0.1)
        accuracy = 0.9 * (1 - math.exp(-6 * step / total))
        noisy = min(1.0, max(0.0, accuracy + noise.uniform(-0.05, 0.05)))
        elapsed_s += 0.0125
        shown = 9.0 if step == spike_at else loss
        batch = noisy if with_accuracy else None
        yield StepEvent(step, epoch, shown, batch, 0.1, 512, elapsed_s, 0.0005)
        if step % steps_per_epoch == 0:
            elapsed_s += 0.5
            value = accuracy if with_accuracy else None
            yield ValidationEvent(step, epoch, loss + 0.02, value, 5000, elapsed_s)
    if num_steps is None:
        yield EndEvent("epochs", total, elapsed_s)


class Run:
    """What `show_training` needs of a run: a thread feeds it as engines would."""

    def __init__(self, step_s: float = 0.001, **training: int) -> None:
        self.history = TrainingHistory()
        self._stopped = threading.Event()
        self._listeners: list[Callable[[TrainingHistory], None]] = []
        self._thread = threading.Thread(target=self._feed, args=(step_s, training))

    def add_listener(self, listener: Callable[[TrainingHistory], None]) -> None:
        """Report to `listener`, and begin."""
        self._listeners.append(listener)
        self._thread.start()

    def stop(self) -> None:
        """Stop at the next step."""
        self._stopped.set()

    def wait(self) -> None:
        """Until nothing more is reported."""
        self._thread.join()

    def _feed(self, step_s: float, training: dict[str, int]) -> None:
        for event in training_events(**training):  # type: ignore[arg-type]
            end = EndEvent("user", len(self.history.steps), self.history.elapsed_s)
            self.history.add(end if self._stopped.is_set() else event)
            self._report()
            if self.history.is_over:
                break
            time.sleep(step_s)
        self._report()

    def _report(self) -> None:
        for listener in self._listeners:
            listener(self.history)
