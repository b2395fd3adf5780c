"""The monitors of a cell (`gpupool.monitor`) and bars of its first rank. Runs on the client."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpupool.core.monitor_lines import MonitorLines
from gpupool.core.progress import AFTER_S, Progress
from gpupool.core.wire.events import Event, MonitorEvent, ProgressEvent
from gpupool.notebook.page.front_end import Place, has_reader, in_notebook

if TYPE_CHECKING:
    from gpupool.notebook.monitor.curves import LoopHistory
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
        # A queue: `take` must not wait for a picture, or the ranks' output would wait as well.
        self._new: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._bars: dict[str, Progress] = {}
        self._shown: dict[int, tuple[LoopHistory, LiveMonitor]] = {}
        self._lines: dict[int, MonitorLines] = {}

    def take(self, events: Sequence[Event]) -> None:
        """Add what a rank has reported."""
        for event in events:
            self._new.put(event)
        if self._is_over:
            self.tick()

    def tick(self) -> None:
        """Show what is new."""
        with self._lock:
            while not self._new.empty():
                event = self._new.get()
                if isinstance(event, MonitorEvent):
                    self._show(event)
                elif isinstance(event, ProgressEvent) and not self._is_over:
                    self._draw_bar(event)

    def finish(self) -> None:
        """The cell is over: leave the last picture of each, and show at once what still comes."""
        self._is_over = True
        with self._lock:
            self.tick()
            for bar in self._bars.values():  # that were not ended
                bar.close()
            for history, view in self._shown.values():
                history.end()
                view(history)
            self._stop_wish = None  # nobody is there to heed it

    def _draw_bar(self, event: ProgressEvent) -> None:
        """One bar for each thing that a rank reports, which it does when that has lasted."""
        if event.what not in self._bars:
            # The rank has waited its second already: the bar is drawn at once.
            self._bars[event.what] = Progress(event.what, unit=event.unit, elapsed_s=AFTER_S)
            self._bars[event.what].start()
        bar = self._bars[event.what]
        bar.update(event.done, event.total or None)
        if event.done == event.total:
            self._bars.pop(event.what).close()

    def _show(self, event: MonitorEvent) -> None:
        if in_notebook():
            self._show_picture(event)
        if not in_notebook() or not has_reader():
            stream = sys.stdout if in_notebook() else sys.stderr
            self._lines.setdefault(event.number, MonitorLines(stream))(event)

    def _show_picture(self, event: MonitorEvent) -> None:
        # imported here: a cell without a monitor is quicker
        from gpupool.notebook.monitor.curves import LoopHistory
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
