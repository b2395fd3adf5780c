"""What each rank reports of itself about once a second while it trains. Runs on engines.

All ranks take the same steps, so all have the same step time: that of the slowest. They differ in
when each begins to wait: when the last of its own gradients is computed. From there until backward
returns it waits, for other ranks and for the gradients on their way ("exchange"), and that is left
out of its own work. What stays in, although the rank waits: batch norms over all ranks, buffers
that DDP makes equal, and the sums over ranks that losses over pixels need. Where there are such,
ranks look alike.

Only where somebody looks: `fit` under plain torchrun has a report without `emit`, which measures
nothing. The events bypass the event log: neither checkpoints nor TensorBoard have them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from gpupool.core.wire.events import PHASES, Event, RankEvent
from gpupool.data import device as devices
from gpupool.data.device import Mark
from gpupool.engine.probe.device_stats import Sampler, make_probe

REPORT_EVERY_S = 1.0
MEASURE_EVERY_S = 0.05  # of short steps only some are measured, so that they cost nothing
_FIRST_S = 0.4  # so that something is shown soon
_OWN = ("data", "compute", "optimizer", "callbacks")  # what the others wait for
_MAX_PENDING = 64  # measured steps that the GPU has not finished yet


class StepSeconds(NamedTuple):
    """A rank's own work in a step and a whole step, as medians; the phases of a step, as means."""

    work_s: float
    step_s: float
    phases: dict[str, float]


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
    """Measures the phases of a rank's steps, and what lies beside the steps.

        timer.begin_step()              # before it asks for the batch
        timer.end("data")
        ...                             # forward
        timer.begin_backward(loss)
        loss.backward()
        timer.end_backward()            # the averaged gradients are there
        ...                             # clip, step
        timer.end("optimizer")
        timer.end_step()                # after what the ranks report to each other
        with timer.beside("saving"): ...

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
        self.seconds_beside: dict[str, float] = {}

    def begin_step(self) -> None:
        """A step begins: the rank is about to ask for its batch."""
        self._laps = None
        if self._device is None:
            return
        now = self._seconds()
        if now - self._measured_at >= MEASURE_EVERY_S:
            self._measured_at, self._laps = now, []
            self.end("begin")

    def begin_backward(self, loss: Tensor) -> None:
        """Note when all that `loss.backward()` computes on this rank is done, before it waits."""
        if self._laps is not None:
            self._is_waiting = False
            loss.register_hook(self._when_backward_begins)

    def end_backward(self) -> None:
        """`backward` has returned: what was waited for is there."""
        self.end("exchange" if self._is_waiting else "compute")
        self._is_waiting = False

    def end(self, phase: str) -> None:
        """This phase of the step is over: see `PHASES`."""
        if self._laps is not None and self._device is not None:
            mark = self._device.mark(timed=True) if self._device.lags else None
            self._laps.append(_Lap(phase, self._seconds(), mark))

    def end_step(self) -> None:
        """The step is over, with what the ranks report to each other."""
        if self._laps and any(lap.phase == "optimizer" for lap in self._laps):  # else an error did
            self.end("rest")
            self._finished.append(self._laps)
        self._laps = None

    def drop(self) -> None:
        """Forget the steps that were measured so far."""
        self._finished.clear()

    @contextmanager
    def beside(self, phase: str) -> Iterator[None]:
        """What is done in this block lies beside the steps: validating, saving."""
        began = self._seconds()
        yield
        lasted = self._seconds() - began
        self.seconds_beside[phase] = self.seconds_beside.get(phase, 0.0) + lasted

    def take(self) -> StepSeconds | None:
        """Of the steps since the last call; None if none was measured."""
        steps = []
        while self._finished and self._finished[0][-1].has_happened():
            phases: dict[str, float] = {}
            for start, end in pairwise(self._finished.popleft()):
                phases[end.phase] = phases.get(end.phase, 0.0) + end.seconds_since(start)
            steps.append(phases)
        if not steps:
            return None
        work = [sum(phases.get(name, 0.0) for name in _OWN) for phases in steps]
        means = {name: fmean(phases.get(name, 0.0) for phases in steps) for name in PHASES}
        return StepSeconds(median(work), median(sum(p.values()) for p in steps), means)

    def _when_backward_begins(self, _gradient: Tensor) -> None:
        # DDP queues the callback that waits when the last gradient is there, so ours comes first.
        Variable._execution_engine.queue_callback(self._when_own_work_ends)

    def _when_own_work_ends(self) -> None:
        self.end("compute")
        self._is_waiting = self._laps is not None  # the step may be over, after an error


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
        self._spent: dict[str, float] = {}
        self._step = self._first = self._counted = 0
        is_on = emit is not None and device is not None
        self.timer = WorkTimer(device if is_on else None, seconds)
        self._sampler = Sampler(lambda: make_probe(device)) if emit and device else None
        self._due = seconds() + _FIRST_S

    def end_step(self, step: int) -> None:
        """A step is over, with what the ranks report to each other after it."""
        self.timer.end_step()
        self._step = step
        if not self._first:  # it sets things up, and says nothing of the others
            self._first = self._counted = step
            self.timer.drop()
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
        self._last = self.timer.take() or self._last
        work_s = step_s = None
        if self._last is not None:
            work_s, step_s, phases = self._last
            # Of short steps only some are measured: they stand for all.
            for name, seconds in phases.items():
                more = seconds * (self._step - self._counted)
                self._spent[name] = self._spent.get(name, 0.0) + more
            self._counted = self._step
        spent = {**self._spent, **self.timer.seconds_beside}
        reading = self._sampler.newest()
        self._emit([RankEvent(self._rank, self._step, work_s, step_s, *reading, spent)])
