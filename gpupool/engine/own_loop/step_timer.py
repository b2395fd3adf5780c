"""Where the time of a step goes, without making the GPU wait. Runs on engines, under torchrun too.

timer = gpupool.StepTimer()
for batch in batches:
    timer.lap("data")
    loss = compute(batch)
    timer.lap("forward")
    loss.backward()
    timer.lap("backward")
    optimizer.step()
    timer.lap("step")
print(timer.summary())        # on every rank: median, p95 and slowest rank of each phase
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from gpupool.core.errors import TrainingError
from gpupool.engine.own_loop.sharding import this_device, world_of
from gpupool.engine.probe.step_clock import Lap, StepClock, phase_ms

WHOLE = "whole step"


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """One phase of a step over all ranks, in ms: `by_rank` holds the median of each rank.

    `median_ms` is the median of these, `p95_ms` the highest 95th percentile of a rank.
    """

    phase: str
    median_ms: float
    p95_ms: float
    slowest_rank: int
    by_rank: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What `StepTimer.summary` returns; `print` makes a table of it.

    `host` is the time that passes in Python; `device` that between the marks on the GPU's stream,
    empty on the CPU. The last entry of each, "whole step", is the sum of a step's phases.
    """

    num_steps: int
    host: tuple[PhaseTimes, ...]
    device: tuple[PhaseTimes, ...] = ()

    def __str__(self) -> str:
        lines = [f"{'phase':<18}{'median ms':>10}{'p95 ms':>10}  slowest rank"]
        for place, phases in (("", self.host), (" (GPU)", self.device)):
            lines += [_line(f"{times.phase}{place}", times) for times in phases]
        return "\n".join([f"{self.num_steps} steps", *lines])


def _line(name: str, times: PhaseTimes) -> str:
    slowest = f"{times.slowest_rank} ({times.by_rank[times.slowest_rank]:.2f} ms)"
    return f"{name:<18}{times.median_ms:>10.2f}{times.p95_ms:>10.2f}  {slowest}"


class StepTimer:
    """Notes when the phases of each step end; see the module.

    A lap costs about a microsecond on a CPU, and with the event of a GPU 4 to 8.

    A step begins where its first phase comes again. On a GPU each lap also records a CUDA event,
    which is read when it has long happened: no step waits for it.

    Args:
        last: how many steps are kept.
        device: this rank's unless given.
    """

    def __init__(
        self,
        last: int = 1000,
        *,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = StepClock(device or this_device(), clock)
        self._steps: deque[list[Lap]] = deque(maxlen=last)
        self._first = ""
        self._num_steps = 0

    def lap(self, phase: str) -> None:
        """The time since the last lap was this phase."""
        lap = self._clock.lap(phase)
        # Nobody has to say where a step begins; a loop may leave phases out in some steps.
        if not self._steps or phase == self._first:
            self._first = phase
            self._steps.append([])
            self._num_steps += 1
        self._steps[-1].append(lap)

    def summary(self, *, skip: int = 1, group: dist.ProcessGroup | None = None) -> StepTimes:
        """The times over all ranks: every rank has to call this. The first `skip` steps are left
        out, as they set things up.

        Raises:
            TrainingError: there is no step left, or the ranks have different phases.
        """
        # `skip` counts from the first step ever; some of those may be forgotten already.
        kept = list(self._steps)[max(0, skip - (self._num_steps - len(self._steps))) :]
        host = _by_phase(kept, Lap.host_ms)
        device: dict[str, list[float]] = {}
        if self._clock.is_on_gpu and kept:
            last = kept[-1][-1].end.event
            assert last is not None
            last.synchronize()  # all earlier ones have happened then
            device = _by_phase(kept, Lap.device_ms)
        # Few numbers of each rank: the laps themselves never leave it.
        by_rank = world_of(group).gather((len(kept), _quantiles(host), _quantiles(device)))
        num_steps = min(num for num, _, _ in by_rank)
        if not num_steps or len({tuple(host) for _, host, _ in by_rank}) > 1:
            raise TrainingError(
                f"StepTimer.summary: {[num for num, _, _ in by_rank]} steps by rank after the "
                f"first {skip}, with the phases {[list(host) for _, host, _ in by_rank]}; every "
                "rank needs at least one, and the same phases.",
                "no steps",
            )
        return StepTimes(
            num_steps,
            _over_ranks([host for _, host, _ in by_rank]),
            _over_ranks([device for _, _, device in by_rank]),
        )


def _by_phase(
    steps: Sequence[Sequence[Lap]], length_ms: Callable[[Lap], float]
) -> dict[str, list[float]]:
    """Phase -> its length in each step that has it, and the sum of each step."""
    lengths: dict[str, list[float]] = {}
    whole = []
    for step in steps:
        in_step = phase_ms(step, length_ms)
        for phase, length in in_step.items():
            lengths.setdefault(phase, []).append(length)
        whole.append(sum(in_step.values()))
    return {**lengths, WHOLE: whole} if whole else {}


def _quantiles(lengths: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Phase -> (median, 95th percentile)."""
    return {
        phase: (float(np.median(values)), float(np.percentile(values, 95)))
        for phase, values in lengths.items()
    }


def _over_ranks(by_rank: Sequence[Mapping[str, tuple[float, float]]]) -> tuple[PhaseTimes, ...]:
    phases = []
    for phase in by_rank[0]:
        medians = tuple(times[phase][0] for times in by_rank)
        phases.append(
            PhaseTimes(
                phase=phase,
                median_ms=statistics.median(medians),
                p95_ms=max(times[phase][1] for times in by_rank),
                slowest_rank=max(range(len(medians)), key=medians.__getitem__),
                by_rank=medians,
            )
        )
    return tuple(phases)
