"""What a step takes this rank itself, without waiting for the others. Runs on engines.

    pace = Pace(device)
    pace.begin()                    # before it asks for the batch
    ...                             # data, forward
    pace.watch(objective)           # before backward
    objective.backward()
    pace.waited()                   # the averaged gradients are there
    ...                             # optimizer
    pace.worked()
    pace.end()                      # after what the ranks report to each other

All ranks take the same steps, so all have the same step time: that of the slowest. What tells them
apart is when each begins to wait: when the last of its own gradients is computed. From there until
backward returns it waits, for other ranks and for the gradients on their way, and that is left out.
What is in it although it waits: batch norms over all ranks, buffers that DDP makes equal, and sums
over the ranks that losses over pixels need; where there are such, ranks look more alike.

On a GPU these moments are CUDA events in its stream, which are read when they have happened: nobody
waits for them. A step is measured at most every 50 ms, so that short ones cost nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

EVERY_S = 0.05
_MAX_PENDING = 64  # steps whose events have not happened yet

# A moment: seconds of the clock, or a CUDA event.
_Mark = Any


class StepSeconds(NamedTuple):
    """Medians: a rank's own work in a step, and a whole step."""

    work_s: float
    step_s: float


@dataclass
class _Step:
    """The moments of one step; `waits` are pairs."""

    begin: _Mark
    waits: list[tuple[_Mark, _Mark]] = field(default_factory=list)
    own_end: _Mark = None
    worked: _Mark = None
    end: _Mark = None


class Pace:
    """Measures the steps of one rank; see the module.

    Args:
        device: where the network computes.
        clock: of seconds, for a CPU, and for when to measure.
    """

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._on_gpu = device.type == "cuda"
        self._step: _Step | None = None
        self._measured_at = -EVERY_S
        self._pending: deque[_Step] = deque(maxlen=_MAX_PENDING)

    def begin(self) -> None:
        """A step begins: the rank is about to ask for its batch."""
        now = self._clock()
        self._step = None
        if now - self._measured_at >= EVERY_S:
            self._measured_at = now
            self._step = _Step(self._mark())

    def watch(self, objective: Tensor) -> None:
        """Note when all that `objective.backward()` computes here is done, before it waits."""
        if self._step is not None:
            self._step.own_end = None
            objective.register_hook(self._when_backward_begins)

    def waited(self) -> None:
        """`backward` has returned: what was waited for is there."""
        step = self._step
        if step is not None and step.own_end is not None:
            step.waits.append((step.own_end, self._mark()))

    def worked(self) -> None:
        """The optimizer has made its step."""
        if self._step is not None:
            self._step.worked = self._mark()

    def end(self) -> None:
        """The step is over, with what the ranks report to each other."""
        step, self._step = self._step, None
        if step is not None and step.worked is not None:
            step.end = self._mark()
            self._pending.append(step)

    def take(self) -> StepSeconds | None:
        """The medians over the steps since the last call; None if none was measured."""
        work, whole = [], []
        while self._pending and self._has_happened(self._pending[0].end):
            step = self._pending.popleft()
            waited = sum(self._between(*pair) for pair in step.waits)
            work.append(self._between(step.begin, step.worked) - waited)
            whole.append(self._between(step.begin, step.end))
        return StepSeconds(median(work), median(whole)) if work else None

    def _when_backward_begins(self, _gradient: Tensor) -> None:
        # DDP queues the callback that waits when the last gradient is there, so ours comes first.
        Variable._execution_engine.queue_callback(self._own_work_ends)

    def _own_work_ends(self) -> None:
        if self._step is not None:
            self._step.own_end = self._mark()

    def _mark(self) -> _Mark:
        if not self._on_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _has_happened(self, mark: _Mark) -> bool:
        return bool(mark.query()) if self._on_gpu else True

    def _between(self, start: _Mark, end: _Mark) -> float:
        """Seconds."""
        return float(start.elapsed_time(end) / 1000 if self._on_gpu else end - start)
