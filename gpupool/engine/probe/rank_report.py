"""What each rank tells of itself about once a second while it trains. Runs on engines.

Only where somebody looks: `fit` under plain torchrun has a report without `emit`, which measures
nothing. It goes past `Told`: neither checkpoints nor TensorBoard have it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpupool.core.wire.events import Event, RankEvent
from gpupool.engine.probe.device_stats import Sampler, make_probe
from gpupool.engine.probe.step_pace import Pace, StepSeconds

EVERY_S = 1.0
_FIRST_S = 0.4  # so that something is shown soon


class RankReport:
    """Reports on this rank, which `stepped` is told of every step; close it in the end.

    Args:
        rank: of the pool.
        device: where the network computes.
        emit: is given the events; without it nothing is measured.
    """

    def __init__(
        self,
        rank: int = 0,
        device: torch.device | None = None,
        emit: Callable[[Sequence[Event]], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rank, self._emit, self._clock = rank, emit, clock
        self._step = 0
        self._seconds: StepSeconds | None = None
        self._pace: Pace | None = None
        self._sampler: Sampler | None = None
        if emit is not None and device is not None:
            self._pace = Pace(device, clock)
            self._sampler = Sampler(lambda: make_probe(device))
        self._due = clock() + _FIRST_S

    def begin(self) -> None:
        """A step begins, before it asks for its batch."""
        if self._pace is not None:
            self._pace.begin()

    def watch(self, objective: Tensor) -> None:
        """The backward in which ranks wait for each other is about to begin."""
        if self._pace is not None:
            self._pace.watch(objective)

    def waited(self) -> None:
        """That backward has returned."""
        if self._pace is not None:
            self._pace.waited()

    def worked(self) -> None:
        """The optimizer has made its step."""
        if self._pace is not None:
            self._pace.worked()

    def stepped(self, step: int) -> None:
        """A step is over, and what ranks tell each other after it."""
        if self._pace is None:
            return
        self._pace.end()
        self._step = step
        if self._clock() >= self._due:
            self._tell()

    def end(self) -> None:
        """The last step was made."""
        if self._pace is not None and self._step:
            self._tell()

    def close(self) -> None:
        """Measure nothing any more."""
        if self._sampler is not None:
            self._sampler.close()

    def _tell(self) -> None:
        assert self._pace is not None
        assert self._sampler is not None
        assert self._emit is not None
        self._due = self._clock() + EVERY_S
        self._seconds = self._pace.take() or self._seconds
        work_s, step_s = self._seconds or (None, None)
        reading = self._sampler.newest()
        self._emit([RankEvent(self._rank, self._step, work_s, step_s, *reading)])
