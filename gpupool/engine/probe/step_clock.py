"""The clock of a rank's steps: on the host, and on its GPU's stream. Runs on engines.

    clock = StepClock(device)
    clock.start()
    ...
    step = [clock.lap("forward")]
    ...
    step += [clock.lap("backward")]
    phase_ms(step, Lap.host_ms)          # {"forward": 3.1, "backward": 6.4}

On a GPU each lap records a CUDA event, which is read when it has happened: no step waits for it.
`rank_report.py` reads this clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from gpupool.data import device as devices
from gpupool.data.device import Mark


class Moment(NamedTuple):
    """A point in time: seconds of the host's clock, and of the stream; None on the CPU."""

    at_s: float
    event: Mark | None

    def has_happened(self) -> bool:
        """Whether the GPU has come so far; on the CPU it always has."""
        return self.event is None or self.event.query()


class Lap(NamedTuple):
    """One phase of a step, from one moment to the next."""

    phase: str
    start: Moment
    end: Moment

    def host_ms(self) -> float:
        """How long it took in Python."""
        return 1000 * (self.end.at_s - self.start.at_s)

    def device_ms(self) -> float:
        """How long it took on the GPU's stream; both moments must have happened."""
        assert self.start.event is not None
        return self.start.event.elapsed_time(self.end.event)


class StepClock:
    """Takes the laps of one rank. A lap costs about a microsecond, with an event 4 to 8.

    Args:
        device: where the network computes.
        seconds: the host's clock.
    """

    def __init__(
        self, device: torch.device, seconds: Callable[[], float] = time.perf_counter
    ) -> None:
        self._seconds, self._device = seconds, devices.of(device)
        self.is_on_gpu = self._device.lags
        self.start()

    def start(self) -> None:
        """The next lap begins now."""
        self._begin = self._now()

    def lap(self, phase: str) -> Lap:
        """The time since the last lap, or since `start`: it was this phase."""
        lap = Lap(phase, self._begin, self._now())
        self._begin = lap.end
        return lap

    def _now(self) -> Moment:
        if not self.is_on_gpu:
            return Moment(self._seconds(), None)
        return Moment(self._seconds(), self._device.mark(timed=True))


def phase_ms(step: Sequence[Lap], length_ms: Callable[[Lap], float]) -> dict[str, float]:
    """Phase -> its length in a step. Laps of one phase add up: micro-batches have several."""
    lengths: dict[str, float] = {}
    for lap in step:
        lengths[lap.phase] = lengths.get(lap.phase, 0.0) + length_ms(lap)
    return lengths
