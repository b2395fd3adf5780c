"""How far a walk over a data set is, as the first rank tells it. Runs on engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gpupool.core.wire.events import ProgressEvent
from gpupool.engine.group.forming import World
from gpupool.engine.output.emit import emit

EVERY_S = 0.2


class Advance:
    """Tells how many samples are done over all ranks: at most five times a second, and at the end.

    What takes less than a fifth of a second tells nothing before its end.

    Args:
        what: see `ProgressEvent`.
        total: samples that there are; 0 of a stream.
        send: is given the events of the first rank.
    """

    def __init__(
        self,
        what: str,
        total: int,
        world: World,
        send: Callable[[Sequence[ProgressEvent]], None] = emit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._clock = what, total, clock
        self._send = send if world.rank == 0 else None
        self._done = 0
        self._told_at = clock()

    def begin(self) -> None:
        """Tell at once that it has begun."""
        self._tell(self._total)

    def add(self, num: int) -> None:
        """So many more are done, on all ranks together."""
        self._done += num
        now = self._clock()
        if now - self._told_at >= EVERY_S:
            self._told_at = now
            self._tell(self._total)

    def end(self) -> None:
        """All are done."""
        self._done = self._total or self._done
        self._tell(self._done)

    def _tell(self, total: int) -> None:
        if self._send is not None:
            done = min(self._done, total) if total else self._done
            self._send([ProgressEvent(self._what, done, total)])
