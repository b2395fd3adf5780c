"""A loop of the user's (`gpupool.monitor`): what it has reported, and its picture. Pure; client."""

from __future__ import annotations

import copy
import math
import time
from collections import deque

from gpupool.core.formatting import duration, number
from gpupool.core.monitor_lines import monitor_line
from gpupool.core.wire.events import OVER, MonitorEvent
from gpupool.notebook.monitor.curves import Curve, Lines, shown
from gpupool.notebook.monitor.plots import legend, own_plot
from gpupool.notebook.monitor.svg import fitted_end
from gpupool.notebook.monitor.widget_state import MonitorState, View

MAX_POINTS = 500
MAX_NEW = 10_000  # points that wait to be sent; if more have come, the whole curves are

_STATUS = {"failed": "ended by an error"}
_HINT = "To stop after the next report, press the stop button of the notebook."


class LoopHistory:
    """One monitor: its last event, the last value of each metric, and curves of bounded size.

    Args:
        hears_stop: somebody waits for the loop, and passes on the press of a Stop button.
    """

    def __init__(self, event: MonitorEvent, *, hears_stop: bool = False) -> None:
        self.event, self.hears_stop = event, hears_stop
        self.started_at = time.time()
        self.step = 0
        self.first: int | None = None
        self.latest: dict[str, float] = {}
        self.curves: dict[str, Curve] = {}
        # Bounded: nobody may take them, as with a view that draws the whole every time.
        self.new: deque[tuple[str, int, float]] = deque(maxlen=MAX_NEW)
        self.num_points = 0
        self._status = ""

    def add(self, event: MonitorEvent) -> None:
        """Add the next event, also one that comes after the end of the cell."""
        self.event, self._status = event, ""
        for step, _, values in event.rows:
            self.step = max(self.step, step)
            self.first = step if self.first is None else min(self.first, step)
            self.latest |= values
            for name, value in values.items():
                if math.isfinite(value):  # others have no place on an axis
                    point = (step, shown(value))
                    self.curves.setdefault(name, Curve(MAX_POINTS)).add(*point)
                    self.new.append((name, *point))
                    self.num_points += 1

    def end(self) -> None:
        """The cell is over: a loop that has not said so was left without `close`."""
        self.hears_stop = False
        if not self.is_over:
            self._status = "stopped" if self.event.status == "stopping" else "ended"

    def lost(self) -> LoopHistory:
        """The same, where the kernel has died now."""
        lost = copy.copy(self)  # shallow: only how it ended differs
        lost.hears_stop = False
        lost._status = f"the kernel stopped at step {number(self.step)}, and the loop with it"
        return lost

    @property
    def status(self) -> str:
        """The status of the last event, or "ended" where the end of the cell was the end."""
        return self._status or self.event.status

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return bool(self._status) or self.event.status in OVER

    @property
    def can_stop(self) -> bool:
        """Whether a press of Stop ends it."""
        return self.hears_stop and self.event.heeds_stop and not self.is_over

    @property
    def progress(self) -> float | None:
        """The share done; None where nobody knows how much there is."""
        num_steps = self.event.num_steps
        return min(1.0, self.step / num_steps) if num_steps else None

    def line(self) -> str:
        """Where it is, in one line of text."""
        line = monitor_line(self.event, self.step, self.latest)
        return line if self.status == self.event.status else f"{line}, {self.status}"


class LoopState(MonitorState):
    """The picture of a loop: see `MonitorState`. Plots are named "0", "1", ... in their order."""

    def __init__(self, history: LoopHistory) -> None:
        super().__init__()
        self._history = history
        self._num_points = 0
        self._groups = history.event.groups

    def is_of_another(self, history: LoopHistory) -> bool:
        """Whether the plots are others now, or points were missed."""
        # More came than `new` holds: only the whole curves have all.
        missed = history.num_points - self._num_points > len(history.new)
        return missed or self._groups != history.event.groups

    def whole(self) -> Lines:
        """All curves, each in a bounded number of points."""
        curves = self._history.curves
        return {
            str(n): {
                str(k): curves[name].points() if name in curves else []
                for k, name in enumerate(names)
            }
            for n, names in enumerate(self._groups.values())
        }

    def _points(self, history: LoopHistory) -> Lines:
        self._groups = history.event.groups
        num_new = min(history.num_points - self._num_points, len(history.new))
        self._num_points = history.num_points
        new = list(history.new)[len(history.new) - num_new :]
        return {
            str(n): {
                str(k): [(step, value) for one, step, value in new if one == name]
                for k, name in enumerate(names)
            }
            for n, names in enumerate(self._groups.values())
        }

    def _plots(self, history: LoopHistory) -> View:
        groups = history.event.groups
        plots = [own_plot(str(n), *group) for n, group in enumerate(groups.items())]
        first, plan = history.first or 0, history.event.num_steps
        # A loop that continues from a checkpoint would be drawn at the right edge alone.
        start = first if 0 < history.step < 4 * first and history.step > first else 0
        end = fitted_end(history.step - start, plan - start, is_over=history.is_over)
        steps = {"low": start, "high": start + end, "per_epoch": 0}
        axes: View = {"steps": steps, "best": {}}
        return {"plots": plots, "legend": legend(plots), "axes": axes}

    def _words(self, history: LoopHistory, status: str) -> View:
        event, latest = history.event, history.latest
        done = f"step {number(history.step)}"
        done += f" of {number(event.num_steps)}" if event.num_steps else ""
        values = [(name, f"{value:.5g}") for name, value in latest.items()]
        facts = [*event.info.items(), ("Elapsed", duration(event.elapsed_s))]
        texts = {
            str(n): ", ".join(f"{name} {latest[name]:.4g}" for name in names if name in latest)
            for n, names in enumerate(event.groups.values())
        }
        titles = dict(zip(texts, event.groups, strict=True))
        state = "" if status == "running" else f": {_STATUS.get(status, status)}"
        return {
            "headline": event.title + state,
            "notice": "",
            "bottleneck": "",
            "clock": {
                "started_at": history.started_at,
                "elapsed_s": event.elapsed_s,
                "remaining_s": None,
                "running": not history.is_over,
            },
            "remaining": done,
            "table": [
                *([("Values", values)] if values else []),
                ("Loop", [*facts, ("Ranks", str(event.world_size))]),
            ],
            "latest": {name: f"{titles[name]}: {text}" for name, text in texts.items()},
            "stop_label": "Stop" if history.can_stop else "",
            "lost": f"{event.title}: {history.lost().status}",
            "hint": _HINT if history.can_stop else "",
            "ranks": [],
            "rank_title": "",
            "rank_summary": "",
            "rank_columns": [],
        }
