"""A loop of the user's (`gpupool.monitor`): what it has reported, and its plots. Pure; client."""

from __future__ import annotations

import time

from gpupool.core.monitor_lines import monitor_line
from gpupool.core.wire.events import OVER, MonitorEvent
from gpupool.notebook.monitor.curves import Lines, View, thinned
from gpupool.notebook.monitor.plots import legend, own_plot
from gpupool.notebook.monitor.svg import fitted_end


class LoopHistory:
    """One monitor: its last event, the last value of each metric, and their curves.

    Args:
        hears_stop: somebody waits for the loop, and passes on the press of a Stop button.
    """

    def __init__(self, event: MonitorEvent, *, hears_stop: bool = False) -> None:
        self.event, self.hears_stop = event, hears_stop
        self.started_at = time.time()
        self.step = 0
        self.first: int | None = None
        self.latest: dict[str, float] = {}
        self._curves: dict[str, dict[int, float]] = {}
        self._status = ""

    def add(self, event: MonitorEvent) -> None:
        """Add the next event, also one that comes after the end of the cell."""
        self.event, self._status = event, ""
        for step, _, values in event.rows:
            self.step = max(self.step, step)
            self.first = step if self.first is None else min(self.first, step)
            self.latest |= values
            for name, value in values.items():
                self._curves.setdefault(name, {})[step] = value

    def end(self) -> None:
        """The cell is over: a loop that has not said so was left without `close`."""
        self.hears_stop = False
        if not self.is_over:
            self._status = "stopped" if self.event.status == "stopping" else "ended"

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

    def plots(self) -> tuple[View, Lines]:
        """Looks and axes of all plots, which are named "0", "1", ... in their order; all lines."""
        groups = self.event.groups
        looks = [own_plot(str(n), *group) for n, group in enumerate(groups.items())]
        lines: Lines = {}
        latest = {}
        for n, (title, names) in enumerate(groups.items()):
            curves = [self._curves.get(name, {}).copy() for name in names]
            lines[str(n)] = {
                str(k): thinned([*curve], [*curve.values()])[0] for k, curve in enumerate(curves)
            }
            values = [f"{name} {self.latest[name]:.4g}" for name in names if name in self.latest]
            latest[str(n)] = f"{title}: {', '.join(values)}"
        first, plan = self.first or 0, self.event.num_steps
        # A loop that continues from a checkpoint would be drawn at the right edge alone.
        start = first if 0 < self.step < 4 * first and self.step > first else 0
        end = start + fitted_end(self.step - start, plan - start, is_over=self.is_over)
        axes = {"steps": {"low": start, "high": end, "per_epoch": 0}, "best": {}}
        return {"plots": looks, "legend": legend(looks), "axes": axes, "latest": latest}, lines
