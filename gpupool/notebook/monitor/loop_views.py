"""The monitors of a cell (`gpupool.monitor`), where the user is. Runs on the client."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpupool.core.monitor_lines import MonitorLines
from gpupool.core.wire.events import Event, MonitorEvent, ProgressEvent
from gpupool.notebook.monitor.rank_bars import RankBars
from gpupool.notebook.page.cell_output import Place
from gpupool.notebook.page.front_end import has_reader, in_notebook

if TYPE_CHECKING:
    from gpupool.notebook.monitor.board import LoopHistory
    from gpupool.notebook.monitor.live import LiveMonitor


class LoopViews:
    """Shows the monitors of a cell: each as the monitor of `train()`, in a terminal as lines.

    Events may come in any thread; what is shown is shown in `tick` and `finish`.

    Args:
        beside: the output whose cell the monitors belong to.
        stop_wish: set when Stop is pressed; without it there is no button.
    """

    def __init__(
        self, *, beside: Place | None = None, stop_wish: threading.Event | None = None
    ) -> None:
        self._beside, self._stop_wish = beside, stop_wish
        self._is_over = False  # nobody calls `tick` any more: what still comes is shown at once
        # Two locks: `take` must not wait for a picture, or the ranks' output would wait as well.
        self._lock, self._showing = threading.Lock(), threading.RLock()
        self._bars = RankBars()
        self._new: list[MonitorEvent] = []
        self._shown: dict[int, tuple[LoopHistory, LiveMonitor]] = {}
        self._lines: dict[int, MonitorLines] = {}

    def take(self, events: Sequence[Event]) -> None:
        """Add what a rank has reported."""
        with self._lock:
            self._new += [event for event in events if isinstance(event, MonitorEvent)]
            self._bars.take(event for event in events if isinstance(event, ProgressEvent))
        if self._is_over:
            self.tick()

    def tick(self) -> None:
        """Show what is new."""
        with self._showing:
            with self._lock:
                new, self._new = self._new, []
            for event in new:
                if in_notebook():
                    self._show(event)
                if not in_notebook() or not has_reader():
                    stream = sys.stdout if in_notebook() else sys.stderr
                    self._lines.setdefault(event.number, MonitorLines(stream))(event)

    def finish(self) -> None:
        """The cell is over: leave the last picture of each, and show at once what still comes."""
        with self._lock:
            self._bars.close()
        with self._showing:
            self.tick()
            for history, view in self._shown.values():
                history.end()
                view(history)
            self._is_over, self._stop_wish = True, None  # nobody is there to heed it

    def _show(self, event: MonitorEvent) -> None:
        # imported here: a cell without a monitor is quicker
        from gpupool.notebook.monitor.board import LoopHistory
        from gpupool.notebook.monitor.live import LiveMonitor

        if event.number in self._shown:
            history, view = self._shown[event.number]
            history.add(event)
            view(history)
        else:
            history = LoopHistory(event, hears_stop=self._stop_wish is not None)
            history.add(event)
            wish = self._stop_wish or threading.Event()
            view = LiveMonitor(wish.set, history, Place(self._beside))
            self._shown[event.number] = history, view
