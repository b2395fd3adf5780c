"""Bars of what the first rank of a cell does: listing a bucket, say. Runs on the client."""

from __future__ import annotations

from collections.abc import Iterable

from gpupool.core.progress import AFTER_S, Progress
from gpupool.core.wire.events import ProgressEvent


class RankBars:
    """One bar for each thing that a rank reports, which it does when that has lasted a second.

    `close` ends those that were not ended.
    """

    def __init__(self) -> None:
        self._bars: dict[str, Progress] = {}
        self._over = False

    def take(self, events: Iterable[ProgressEvent]) -> None:
        """Add what a rank has reported, in any thread."""
        for event in events:
            if self._over:  # a thread that continues when the cell has ended
                return
            if event.what not in self._bars:
                # The rank has waited its second already: the bar is drawn at once.
                self._bars[event.what] = Progress(event.what, unit=event.unit, elapsed_s=AFTER_S)
                self._bars[event.what].start()
            bar = self._bars[event.what]
            bar.update(event.done, event.total or None)
            if event.done == event.total:
                self._bars.pop(event.what).close()

    def close(self) -> None:
        """The cell is over."""
        self._over = True
        for bar in self._bars.values():
            bar.close()
        self._bars.clear()
