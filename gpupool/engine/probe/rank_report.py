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
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from gpupool.core.wire.events import Event, RankEvent
from gpupool.data import device as devices
from gpupool.data.device import Mark
from gpupool.engine.probe.device_stats import Sampler, make_probe

REPORT_EVERY_S = 1.0
MEASURE_EVERY_S = 0.05  # of short steps only some are measured, so that they cost nothing
_FIRST_S = 0.4  # so that something is shown soon
_MAX_PENDING = 64  # measured steps that the GPU has not finished yet


class StepSeconds(NamedTuple):
    """Medians: a rank's own work in a step, and a whole step."""

    work_s: float
    step_s: float


class _Lap(NamedTuple):
    """The end of a phase of a step, on the host's clock and on the stream; None on the CPU."""

    phase: str
    at_s: float
    mark: Mark | None

    def has_happened(self) -> bool:
        """Whether the GPU has come so far; on the CPU it always has."""
        return self.mark is None or self.mark.query()

    def seconds_since(self, start: _Lap) -> float:
        """How long it took; both must have happened."""
        if self.mark is None or start.mark is None:
            return self.at_s - start.at_s
        return start.mark.elapsed_time(self.mark) / 1000


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

    On a GPU the ends of phases are CUDA events, which are read when they have happened: no step
    waits for them.

    Args:
        device: where the network computes; without one nothing is measured.
        seconds: the clock of the host.
    """

    def __init__(
        self, device: torch.device | None, seconds: Callable[[], float] = time.perf_counter
    ) -> None:
        self._seconds = seconds
        self._device = devices.of(device) if device is not None else None
        self._laps: list[_Lap] | None = None  # of the present step, if it is measured
        self._is_waiting = False
        self._measured_at = -MEASURE_EVERY_S
        self._finished: deque[list[_Lap]] = deque(maxlen=_MAX_PENDING)

    def begin_step(self) -> None:
        """A step begins: the rank is about to ask for its batch."""
        self._laps = None
        if self._device is None:
            return
        now = self._seconds()
        if now - self._measured_at >= MEASURE_EVERY_S:
            self._measured_at, self._laps = now, []
            self._lap("begin")

    def begin_backward(self, loss: Tensor) -> None:
        """Note when all that `loss.backward()` computes on this rank is done, before it waits."""
        if self._laps is not None:
            self._is_waiting = False
            loss.register_hook(self._when_backward_begins)

    def end_backward(self) -> None:
        """`backward` has returned: what was waited for is there."""
        if self._is_waiting:  # else it waited for nobody: one rank, or a step that is not measured
            self._lap("wait")
            self._is_waiting = False

    def end_work(self) -> None:
        """The optimizer has made its step."""
        self._lap("work")

    def end_step(self) -> None:
        """The step is over, with what the ranks report to each other."""
        if self._laps and self._laps[-1].phase == "work":  # else an error ended the step
            self._lap("report")
            self._finished.append(self._laps)
        self._laps = None

    def take_medians(self) -> StepSeconds | None:
        """The medians over the steps since the last call; None if none was measured."""
        work, whole = [], []
        while self._finished and self._finished[0][-1].has_happened():
            laps = self._finished.popleft()
            lengths = [(end.phase, end.seconds_since(start)) for start, end in pairwise(laps)]
            work.append(sum(length for phase, length in lengths if phase == "work"))
            whole.append(sum(length for _, length in lengths))
        return StepSeconds(median(work), median(whole)) if work else None

    def _when_backward_begins(self, _gradient: Tensor) -> None:
        # DDP queues the callback that waits when the last gradient is there, so ours comes first.
        Variable._execution_engine.queue_callback(self._when_own_work_ends)

    def _when_own_work_ends(self) -> None:
        self._lap("work")
        self._is_waiting = self._laps is not None  # the step may be over, after an error

    def _lap(self, phase: str) -> None:
        if self._laps is not None and self._device is not None:
            mark = self._device.mark(timed=True) if self._device.lags else None
            self._laps.append(_Lap(phase, self._seconds(), mark))


class RankReport:
    """Reports how this rank fares, with the help of `timer`; close it in the end.

    Args:
        rank: of the pool.
        device: where the network computes.
        emit: receives the events; without it nothing is measured.
        seconds: the clock of the host.
    """

    def __init__(
        self,
        rank: int = 0,
        device: torch.device | None = None,
        emit: Callable[[Sequence[Event]], None] | None = None,
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rank, self._emit, self._seconds = rank, emit, seconds
        self._last: StepSeconds | None = None
        self._step = 0
        is_on = emit is not None and device is not None
        self.timer = WorkTimer(device if is_on else None, seconds)
        self._sampler = Sampler(lambda: make_probe(device)) if emit and device else None
        self._due = seconds() + _FIRST_S

    def end_step(self, step: int) -> None:
        """A step is over, with what the ranks report to each other after it."""
        self.timer.end_step()
        self._step = step
        if self._sampler is not None and self._seconds() >= self._due:
            self._report()

    def end(self) -> None:
        """The last step was made."""
        if self._sampler is not None and self._step:
            self._report()

    def close(self) -> None:
        """Measure nothing any more."""
        if self._sampler is not None:
            self._sampler.close()

    def _report(self) -> None:
        assert self._sampler is not None
        assert self._emit is not None
        self._due = self._seconds() + REPORT_EVERY_S
        self._last = self.timer.take_medians() or self._last
        work_s, step_s = self._last or (None, None)
        reading = self._sampler.newest()
        self._emit([RankEvent(self._rank, self._step, work_s, step_s, *reading)])
