"""The curves of a training as bounded plain data, with their axes. Pure; runs on the client.

The live monitor (`monitor.py`) sends them to the browser, the final picture (`picture.py`) turns
them into SVG; both only scale to pixels.
"""

from __future__ import annotations

import math
from typing import Any

from gpupool.training.history import TrainingHistory, smooth

Point = tuple[int, float]
# plot ("accuracy" in percent, "loss") -> line ("raw", "smooth", "validation") -> points
Lines = dict[str, dict[str, list[Point]]]

PLOTS = ("accuracy", "loss")
LINES = ("raw", "smooth", "validation")
MAX_BANDS = 12
MAX_SHARED_BANDS = 8  # their labels are longer


class Curve:
    """One line in at most `max_points` points, however many are added.

    Steps fall into buckets of equal length. A bucket keeps its lowest and its highest value, so
    that one spike among 100 000 steps is still seen. When the buckets become too many, each two
    neighbours become one.
    """

    def __init__(self, max_points: int = 600) -> None:
        self._max_buckets = (max_points - 1) // 2
        self._width = 1
        self._buckets: dict[int, tuple[Point, Point]] = {}
        self._last: Point | None = None
        self.low = math.inf
        self.high = -math.inf

    def add(self, step: int, value: float) -> None:
        """Append a point."""
        self._last = (step, value)
        self.low, self.high = min(self.low, value), max(self.high, value)
        self._put(step // self._width, self._last, self._last)
        if len(self._buckets) > self._max_buckets:
            self._width *= 2
            old, self._buckets = self._buckets, {}
            for index, (low, high) in old.items():
                self._put(index // 2, low, high)

    def points(self) -> list[Point]:
        """What is to be drawn, in the order of steps, up to the very last point."""
        points: list[Point] = []
        for low, high in self._buckets.values():
            points += (low,) if low is high else (low, high) if low < high else (high, low)
        if self._last and points[-1] != self._last:
            points.append(self._last)
        return points

    def _put(self, index: int, low: Point, high: Point) -> None:
        if index in self._buckets:
            other_low, other_high = self._buckets[index]
            low = low if low[1] < other_low[1] else other_low
            high = high if high[1] > other_high[1] else other_high
        self._buckets[index] = (low, high)


class Curves:
    """Both plots of one training, filled from its history as that grows."""

    def __init__(self, max_points: int = 600) -> None:
        self._curves = {plot: {line: Curve(max_points) for line in LINES} for plot in PLOTS}
        self._smooth: dict[str, float | None] = dict.fromkeys(PLOTS)
        self._num_steps = 0
        self._num_validations = 0

    def take(self, history: TrainingHistory) -> Lines:
        """Take in what is new in `history`; returns just that."""
        new: Lines = {plot: {line: [] for line in LINES} for plot in PLOTS}
        steps = history.steps[self._num_steps :]
        validations = history.validations[self._num_validations :]
        self._num_steps += len(steps)
        self._num_validations += len(validations)
        for step in steps:
            self._add_step(new, "loss", step.step, step.loss)
            if step.accuracy is not None:
                self._add_step(new, "accuracy", step.step, 100 * step.accuracy)
        for event in validations:
            self._add(new, "loss", "validation", event.step, event.loss)
            if event.accuracy is not None:
                self._add(new, "accuracy", "validation", event.step, 100 * event.accuracy)
        return new

    def whole(self) -> Lines:
        """Everything so far, thinned out."""
        return {
            plot: {line: curve.points() for line, curve in curves.items()}
            for plot, curves in self._curves.items()
        }

    def axes(self, history: TrainingHistory) -> dict[str, Any]:
        """Ends and labelled ticks of each axis, and the epochs as bands along the steps."""
        x_max = max(history.num_steps, self._num_steps, 1)
        lows_highs = [(c.low, c.high) for c in self._curves["loss"].values() if c.low <= c.high]
        low = min([0.0, *(low for low, _ in lows_highs)])
        high = max((high for _, high in lows_highs), default=1.0)
        return {
            "steps": {"low": 0, "high": x_max, "ticks": _labelled(step_ticks(x_max))},
            "accuracy": {"low": 0, "high": 100, "ticks": _labelled([0, 25, 50, 75, 100])},
            "loss": nice_axis(low, high),
            "bands": epoch_bands(history),
        }

    def _add_step(self, new: Lines, plot: str, step: int, value: float) -> None:
        self._smooth[plot] = smoothed = smooth(self._smooth[plot], value)
        self._add(new, plot, "raw", step, value)
        self._add(new, plot, "smooth", step, smoothed)

    def _add(self, new: Lines, plot: str, line: str, step: int, value: float) -> None:
        """Add a point; NaN and infinity have no place on an axis and are left out."""
        if math.isfinite(value):
            shown = float(f"{value:.5g}")  # more digits than pixels can show, fewer to send
            self._curves[plot][line].add(step, shown)
            new[plot][line].append((step, shown))


def nice_step(span: float, count: int) -> float:
    """The smallest 1, 2, 2.5 or 5 times a power of ten that divides `span` in at most `count`."""
    power: float = 10.0 ** math.floor(math.log10(span / count))
    return next(m * power for m in (1, 2, 2.5, 5, 10, 20) if span <= count * m * power * (1 + 1e-9))


def step_ticks(num_steps: int) -> list[float]:
    """Half a dozen round numbers of steps; whole ones, as there are no half steps.

    >>> step_ticks(900), step_ticks(3)
    ([0, 200, 400, 600, 800], [0, 1, 2, 3])
    """
    return list(range(0, num_steps + 1, math.ceil(nice_step(num_steps, 6))))


def nice_axis(low: float, high: float) -> dict[str, Any]:
    """An axis that begins and ends on a tick and holds both values."""
    if high <= low:
        high = low + 1.0
    step = nice_step(high - low, 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [float(f"{i * step:.12g}") for i in range(first, last + 1)]
    return {"low": ticks[0], "high": ticks[-1], "ticks": _labelled(ticks)}


def epoch_bands(history: TrainingHistory) -> list[tuple[int, int, str]]:
    """(first step, last step, label) of at most a dozen bands; many epochs share a band."""
    if history.start is None:
        return []
    num_epochs, per_epoch = history.start.num_epochs, history.start.steps_per_epoch
    size = 1 if num_epochs <= MAX_BANDS else math.ceil(nice_step(num_epochs, MAX_SHARED_BANDS))
    bands = []
    for first in range(1, num_epochs + 1, size):
        last = min(first + size - 1, num_epochs)
        label = str(first) if first == last else f"{first}–{last}"
        if first == 1:
            label = ("Epoch " if size == 1 else "Epochs ") + label
        bands.append(((first - 1) * per_epoch, last * per_epoch, label))
    return bands


def _labelled(ticks: list[float]) -> list[tuple[float, str]]:
    def label(tick: float) -> str:
        return f"{tick:,.0f}".replace(",", "\u202f") if abs(tick) >= 1000 else f"{tick:g}"

    return [(tick, label(tick)) for tick in ticks]
