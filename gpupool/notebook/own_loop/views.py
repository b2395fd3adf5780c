"""The monitors of a cell (`gpupool.monitor`), where the user is. Runs on the client."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpupool.core.wire.events import ProgressEvent, from_dict
from gpupool.core.wire.monitor_event import MonitorEvent, MonitorLines
from gpupool.notebook.monitor.rank_bars import RankBars
from gpupool.notebook.page.cell_output import Place
from gpupool.notebook.page.front_end import has_widgets, in_notebook

if TYPE_CHECKING:
    from gpupool.notebook.own_loop.history import LoopHistory
    from gpupool.notebook.own_loop.stop_button import LoopStop

REDRAW_EVERY_S = 0.5


class LoopViews:
    """Shows the monitors of a cell: a picture for each, drawn anew twice a second; else lines.

    Events may come in any thread; what is shown is shown in `tick` and `finish`.

    Args:
        at_once: what comes is shown when it comes, as nobody calls `tick`.
        beside: the output whose cell the pictures belong to.
        stop_wish: set when the Stop button of a picture is pressed; without it there is none.
    """

    def __init__(
        self,
        *,
        at_once: bool = False,
        beside: Place | None = None,
        stop_wish: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._at_once, self._beside, self._clock = at_once, beside, clock
        self._stop_wish = stop_wish
        self._lock, self._showing = threading.Lock(), threading.RLock()
        self._bars = RankBars()
        self._new: list[MonitorEvent] = []
        self._histories: dict[int, LoopHistory] = {}
        self._places: dict[int, Place] = {}
        self._stops: dict[int, LoopStop] = {}
        self._lines: dict[int, MonitorLines] = {}
        self._drawn_at: dict[int, float] = {}
        self._undrawn: set[int] = set()

    def take(self, events: Sequence[dict[str, Any]]) -> None:
        """Take in what a rank has told."""
        told = list(map(from_dict, events))
        with self._lock:
            self._new += [event for event in told if isinstance(event, MonitorEvent)]
            self._bars.take(event for event in told if isinstance(event, ProgressEvent))
        if self._at_once:
            self.tick()

    def tick(self) -> None:
        """Show what is new, if it is time."""
        with self._showing:
            self._show_new()

    def finish(self) -> None:
        """The cell is over: leave the last picture of each, and show at once what still comes."""
        with self._lock:
            self._bars.close()
        with self._showing:
            self._show_new()
            for number, history in self._histories.items():
                if not history.is_over:
                    history.end()
                    self._undrawn.add(number)
                if number in self._undrawn:
                    self._draw(number, self._clock())
            self._at_once, self._stop_wish = True, None  # nobody is there to heed it

    def _show_new(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for event in new:
            if in_notebook():
                from gpupool.notebook.own_loop.history import (
                    LoopHistory,  # a cell without one is quicker
                )

                self._histories.setdefault(event.number, LoopHistory(event)).add(event)
                self._undrawn.add(event.number)
            else:
                self._lines.setdefault(event.number, MonitorLines(sys.stderr))(event)
        now = self._clock()
        for number in sorted(self._undrawn):
            is_over = self._histories[number].is_over
            if is_over or now - self._drawn_at.get(number, -REDRAW_EVERY_S) >= REDRAW_EVERY_S:
                self._draw(number, now)

    def _draw(self, number: int, now: float) -> None:
        from gpupool.notebook.own_loop.picture import loop_html, loop_text

        self._drawn_at[number] = now
        self._undrawn.discard(number)
        place = self._places.setdefault(number, Place(self._beside))
        history = self._histories[number]
        uid = self._stop_of(number).uid if self._has_stop(history) else ""
        place.show({"text/html": loop_html(history, uid), "text/plain": loop_text(history)})
        if not uid and number in self._stops:
            self._stops.pop(number).close()

    def _has_stop(self, history: LoopHistory) -> bool:
        return self._stop_wish is not None and history.can_stop and has_widgets()

    def _stop_of(self, number: int) -> LoopStop:
        """The button of a picture, made when it is first needed."""
        from gpupool.notebook.own_loop.stop_button import LoopStop  # anywidget may be missing

        if number not in self._stops:
            assert self._stop_wish is not None
            self._stops[number] = LoopStop(self._stop_wish)
        return self._stops[number]
