"""What a loop of the user's has told of itself so far. Pure; runs on the client."""

from __future__ import annotations

import math
from typing import Any

from gpupool.core.wire.monitor_event import OVER, MonitorEvent
from gpupool.notebook.monitor.curves import Curve, Point, nice_axis, step_axis

MAX_POINTS = 500


class LoopHistory:
    """One monitor: its last event, the last value of each metric, and curves of bounded size."""

    def __init__(self, event: MonitorEvent) -> None:
        self.event = event
        self.step = 0
        self.latest: dict[str, float] = {}
        self._status = ""
        self._curves: dict[str, Curve] = {}

    def add(self, event: MonitorEvent) -> None:
        """Take in the next event, also one that comes after the end of the cell."""
        self.event, self._status = event, ""
        for step, _, values in event.rows:
            self.step = max(self.step, step)
            self.latest |= values
            for name, value in values.items():
                if math.isfinite(value):  # others have no place on an axis
                    self._curves.setdefault(name, Curve(MAX_POINTS)).add(step, value)

    def end(self) -> None:
        """The cell is over: a loop that has not said so has been left without `close`."""
        if not self.is_over:
            self._status = "stopped" if self.event.status == "stopping" else "ended"

    @property
    def status(self) -> str:
        """That of the last event, or "ended" where the end of the cell was the end."""
        return self._status or self.event.status

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return bool(self._status) or self.event.status in OVER

    @property
    def can_stop(self) -> bool:
        """Whether it would end if it were told to, and has not been."""
        return self.event.heeds_stop and self.status == "running"

    @property
    def progress(self) -> float | None:
        """The share done; None where nobody knows how much there is."""
        num_steps = self.event.num_steps
        return min(1.0, self.step / num_steps) if num_steps else None

    def points(self, metric: str) -> list[Point]:
        """The curve of a metric."""
        curve = self._curves.get(metric)
        return curve.points() if curve else []

    def axes(self, metrics: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The axes of steps and of values for a plot of these metrics."""
        last = max(self.event.num_steps, self.step, 1)
        steps = step_axis(last)
        curves = [self._curves[name] for name in metrics if name in self._curves]
        low = min([0.0, *(curve.low for curve in curves)])
        return steps, nice_axis(low, max((curve.high for curve in curves), default=1.0))
