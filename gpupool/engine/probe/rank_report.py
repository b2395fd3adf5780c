"""What each rank reports of itself about once a second while it trains. Runs on engines.

All ranks take the same steps, so all have the same step time: that of the slowest. They differ in
when each begins to wait: when the last of its own gradients is computed. From there until backward
returns it waits, for other ranks and for the gradients on their way, and that is left out of its
own work. What stays in, although the rank waits: batch norms over all ranks, buffers that DDP makes
equal, and the sums over ranks that losses over pixels need. Where there are such, ranks look alike.

Only where somebody looks: `fit` under plain torchrun has a report without `emit`, which measures
nothing. The events bypass the event log: neither checkpoints nor TensorBoard have them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor
from torch.autograd import Variable

from gpupool.core.wire.events import Event, RankEvent
from gpupool.data import device as devices
from gpupool.data.device import Mark
from gpupool.engine.probe.device_stats import make_probe

REPORT_EVERY_S = 1.0
MEASURE_EVERY_S = 0.05  # of short steps only some are measured, so that they cost nothing
_FIRST_S = 0.4  # so that something is shown soon
_MAX_PENDING = 64  # measured steps that the GPU has not finished yet


class WorkTimer:
    """Measures a rank's own work in its steps, without what it waits for the others.

        timer.begin_step()              # before it asks for the batch
        ...                             # data, forward
        timer.begin_backward(loss)
        loss.backward()
        timer.end_backward()            # the averaged gradients are there
        ...                             # clip, step
        timer.end_work()
        timer.end_step()                # after what the ranks report to each other

    Args:
        mark: a place in the order of the device's work; without it nothing is measured. Marks are
            read when the device has come so far: no step waits for them.
        seconds: the clock of the host.
    """

    def __init__(
        self, mark: Callable[[], Mark] | None, seconds: Callable[[], float] = time.perf_counter
    ) -> None:
        self._mark, self._seconds = mark, seconds
        self._laps: list[tuple[str, Mark]] = []  # phases of the present step, and their ends
        self._measured_at = -MEASURE_EVERY_S
        self._finished: deque[list[tuple[str, Mark]]] = deque(maxlen=_MAX_PENDING)

    def begin_step(self) -> None:
        """A step begins: the rank is about to ask for its batch."""
        self._laps = []
        now = self._seconds()
        if self._mark is not None and now - self._measured_at >= MEASURE_EVERY_S:
            self._measured_at = now
            self._laps = [("begin", self._mark())]

    def begin_backward(self, loss: Tensor) -> None:
        """Note when all that `loss.backward()` computes on this rank is done, before it waits."""
        if self._laps:
            # DDP queues the callback that waits when the last gradient is there: ours comes first.
            queue = Variable._execution_engine.queue_callback
            loss.register_hook(lambda _gradient: queue(partial(self._end, "own")))

    def end_backward(self) -> None:
        """`backward` has returned: what was waited for is there."""
        if self._laps and self._laps[-1][0] == "own":  # else it waited for nobody
            self._end("wait")

    def end_work(self) -> None:
        """The optimizer has made its step."""
        self._end("work")

    def end_step(self) -> None:
        """The step is over, with what the ranks report to each other."""
        self._end("report")
        if self._laps:
            self._finished.append(self._laps)
        self._laps = []

    def take_medians(self) -> tuple[float, float] | None:
        """The median seconds of own work and of a whole step, of those since the last call; None
        if none was measured."""
        work, whole = [], []
        while self._finished and self._finished[0][-1][1].query():
            laps = self._finished.popleft()
            lengths = [
                (phase, begin.elapsed_time(end) / 1000)
                for (_, begin), (phase, end) in pairwise(laps)
            ]
            work.append(sum(length for what, length in lengths if what in ("own", "work")))
            whole.append(sum(length for _, length in lengths))
        return (median(work), median(whole)) if work else None

    def _end(self, phase: str) -> None:
        if self._laps and self._mark is not None:
            self._laps.append((phase, self._mark()))


class RankReport:
    """Reports how this rank fares, with the help of `timer`.

    Args:
        rank: of the pool.
        device: where the network computes.
        emit: receives the events; without it nothing is measured.
    """

    def __init__(
        self,
        rank: int = 0,
        device: torch.device | None = None,
        emit: Callable[[Sequence[Event]], None] | None = None,
    ) -> None:
        self._rank, self._emit, self._step = rank, emit, 0
        self._last: tuple[float | None, float | None] = None, None
        self._probe = make_probe(device) if emit and device else None
        mark = partial(devices.of(device).mark, timed=True) if emit and device else None
        self.timer = WorkTimer(mark)
        self._due = time.perf_counter() + _FIRST_S

    def end_step(self, step: int) -> None:
        """A step is over, with what the ranks report to each other after it."""
        self.timer.end_step()
        self._step = step
        if time.perf_counter() >= self._due:
            self.end()

    def end(self) -> None:
        """Report; also when the last step was made."""
        if self._probe is None or self._emit is None or not self._step:
            return
        self._due = time.perf_counter() + REPORT_EVERY_S
        self._last = self.timer.take_medians() or self._last
        work_s, step_s = self._last
        self._emit([RankEvent(self._rank, self._step, work_s, step_s, *self._probe())])
