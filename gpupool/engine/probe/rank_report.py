"""What each rank reports of itself about once a second while it trains. Runs on engines.

All ranks take the same steps, so all have the same step time: that of the slowest. They differ in
when each begins to wait: when the last of its own gradients is computed. From there until backward
returns it waits, for other ranks and for the gradients on their way ("exchange"), and that is left
out of its own work. What stays in, although the rank waits: batch norms over all ranks, buffers
that DDP makes equal, and the sums over ranks that losses over pixels need. Where there are such,
ranks look alike.

The events bypass the event log: checkpoints do not have them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import fmean, median

import psutil
import torch
from torch import Tensor
from torch.autograd import Variable

from gpupool.core.machine import limits
from gpupool.core.machine.gpus import read_gauges
from gpupool.core.wire.events import PHASES, Event, RankEvent
from gpupool.data import device as devices
from gpupool.data.device import Mark

REPORT_EVERY_S = 1.0
MEASURE_EVERY_S = 0.05  # of short steps only some are measured, so that they cost nothing
_FIRST_S = 0.4  # so that something is shown soon
_OWN = ("data", "compute", "optimizer", "callbacks")  # what the others wait for
_MAX_PENDING = 64  # measured steps that the GPU has not finished yet

Reading = tuple[float | None, int | None, int | None, int | None]
"""How busy, full and warm a device is, as in `RankEvent`: utilization, memory_bytes,
total_memory_bytes, temperature_c. None where the driver, or the card, has no answer."""


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

    `mark` makes a place in the order of the device's work, without it nothing is measured. Marks
    are read when the device has come so far: no step waits for them.
    """

    def __init__(
        self, mark: Callable[[], Mark] | None, seconds: Callable[[], float] = time.perf_counter
    ) -> None:
        self._mark, self._seconds = mark, seconds
        self._laps: list[tuple[str, Mark]] = []  # phases of the present step, and their ends
        self._measured_at = -MEASURE_EVERY_S
        self._finished: deque[list[tuple[str, Mark]]] = deque(maxlen=_MAX_PENDING)
        self.seconds_beside: dict[str, float] = {}

    def begin_step(self) -> None:
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
            loss.register_hook(lambda _gradient: queue(partial(self.end, "own")))

    def end_backward(self) -> None:
        waited = self._laps and self._laps[-1][0] == "own"  # else for nobody
        self.end("exchange" if waited else "compute")

    def end(self, phase: str) -> None:
        """This phase of the step is over: one of `PHASES`; "own" is of "compute"."""
        if self._laps and self._mark is not None:
            self._laps.append((phase, self._mark()))

    def end_step(self) -> None:
        self.end("rest")
        if self._laps:
            self._finished.append(self._laps)
        self._laps = []

    @contextmanager
    def beside(self, phase: str) -> Iterator[None]:
        began = self._seconds()
        yield
        lasted = self._seconds() - began
        self.seconds_beside[phase] = self.seconds_beside.get(phase, 0.0) + lasted

    def forget(self) -> None:
        self._finished.clear()

    def take(self) -> list[dict[str, float]]:
        steps = []
        while self._finished and self._finished[0][-1][1].query():
            found = dict.fromkeys(PHASES, 0.0)
            for (_, begin), (phase, end) in pairwise(self._finished.popleft()):
                found["compute" if phase == "own" else phase] += begin.elapsed_time(end) / 1000
            steps.append(found)
        return steps


class RankReport:
    """`rank` is that of the pool; without `emit`, which gets the events, nothing is measured."""

    def __init__(
        self,
        rank: int = 0,
        device: torch.device | None = None,
        emit: Callable[[Sequence[Event]], None] | None = None,
    ) -> None:
        self._rank, self._emit, self._step = rank, emit, 0
        self._last: tuple[float | None, float | None] = None, None
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._counted = 0  # steps that are in it, or left out
        make_probe = _gpu_probe if device and device.type == "cuda" else _cpu_probe
        self._probe = make_probe(device) if emit and device else None
        mark = partial(devices.of(device).mark, timed=True) if emit and device else None
        self.timer = WorkTimer(mark)
        self._due = time.perf_counter() + _FIRST_S

    def end_step(self, step: int) -> None:
        self.timer.end_step()
        if not self._step:  # the first one sets things up, and says nothing of the others
            self._counted = step
            self.timer.forget()
        self._step = step
        if time.perf_counter() >= self._due:
            self.end()

    def end(self) -> None:
        if self._probe is None or self._emit is None or not self._step:
            return
        self._due = time.perf_counter() + REPORT_EVERY_S
        steps = self.timer.take()
        if steps:
            work = [sum(step[phase] for phase in _OWN) for step in steps]
            self._last = median(work), median(sum(step.values()) for step in steps)
            # Of short steps only some are measured: they stand for all.
            for phase in PHASES:
                mean_s = fmean(step[phase] for step in steps)
                self._spent[phase] += mean_s * (self._step - self._counted)
            self._counted = self._step
        spent = self._spent | self.timer.seconds_beside
        work_s, step_s = self._last
        self._emit([RankEvent(self._rank, self._step, work_s, step_s, *self._probe(), spent)])


def _cpu_probe(_: torch.device) -> Callable[[], Reading]:
    """This process: CPU time over wall time times torch's threads, since the last reading."""
    process, at, cpu = psutil.Process(), time.monotonic(), time.process_time()
    # In a container the limit of its cgroup is what ends the process, not the machine's memory.
    of_machine = psutil.virtual_memory().total
    total = min(of_machine, limits.memory_limit() or of_machine)

    def read() -> Reading:
        nonlocal at, cpu
        now, used = time.monotonic(), time.process_time()
        share = (used - cpu) / max(now - at, 1e-3) / torch.get_num_threads()
        at, cpu = now, used
        return min(1.0, share), process.memory_info().rss, total, None

    return read


def _gpu_probe(device: torch.device) -> Callable[[], Reading]:
    """The driver's, or torch's own figures if it does not know the GPU. torch leaves the kind out
    of the UUID: "GPU-", or "MIG-" of an instance of one."""
    gpu = devices.Cuda(device)
    names = [f"{kind}{gpu.uuid.removeprefix(kind)}" for kind in ("GPU-", "MIG-")]

    def read() -> Reading:
        for name in names:
            if (found := read_gauges(name)) is not None:
                used, total, percent, warm = found
                return None if percent is None else percent / 100, used, total, warm
        return None, *gpu.memory(), None

    return read
