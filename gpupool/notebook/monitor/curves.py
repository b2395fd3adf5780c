"""Curves as bounded plain data, with their axes, and those of a training. Pure; on the client.

The live monitor (`widget.py`) sends them to the browser, the final picture (`picture.py`) turns
them into SVG; both only scale to pixels.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from gpupool.core.wire.events import StartEvent, ValidationEvent
from gpupool.notebook.monitor import words
from gpupool.training.history import TrainingHistory, smooth

Point = tuple[int, float]
# plot -> line -> points; of a training "accuracy" (in percent) and "loss", each with `LINES`
Lines = dict[str, dict[str, list[Point]]]

TITLES = {"accuracy": "Accuracy (%)", "loss": "Loss"}
LINES = ("raw", "smooth", "validation")
MAX_LABEL_CHARS = 6  # what there is room for beside a plot
MAX_BANDS = 12
MAX_SHARED_BANDS = 8  # their labels are longer


class Curve:
    """One line in at most `max_points` points, however many are added.

    Steps fall into buckets of equal length. A bucket keeps its lowest and its highest value, so
    that one spike among 100 000 steps is still seen. When the buckets become too many, each two
    neighbours become one.
    """

    def __init__(self, max_points: int = 600) -> None:
        # Two points a bucket, its lowest and highest, and the very last point.
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
            # Neighbours are joined in pairs, so a point costs the same after any number of steps.
            self._width *= 2
            old, self._buckets = self._buckets, {}
            for index, (low, high) in old.items():
                self._put(index // 2, low, high)

    def points(self) -> list[Point]:
        """What is to be drawn, in the order of steps, up to the very last point."""
        points: list[Point] = []
        for low, high in self._buckets.values():
            # Points compare by step first: the two of a bucket are drawn in their order.
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
        self._max_points = max_points
        self._start: StartEvent | None = None
        self._banded: StartEvent | None = None
        self._epoch_bands: list[tuple[int, int, str]] = []
        self._begin()

    def _begin(self) -> None:
        max_points = self._max_points
        self._curves = {plot: {line: Curve(max_points) for line in LINES} for plot in TITLES}
        self._smooth: dict[str, float | None] = dict.fromkeys(TITLES)
        self._num_steps = 0
        self._num_validations = 0

    def take(self, history: TrainingHistory) -> Lines:
        """Add what is new in `history`; returns just that.

        A training that has started again reports everything again, see `is_of_another`.
        """
        # Else the curves of the lost attempt would be drawn below the new ones.
        if self.is_of_another(history):
            self._begin()
        self._start = history.start
        new: Lines = {plot: {line: [] for line in LINES} for plot in TITLES}
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

    def is_of_another(self, history: TrainingHistory) -> bool:
        """Whether the points so far are of an attempt before the one that `history` is of now."""
        return self._start is not None and history.start is not self._start

    def whole(self) -> Lines:
        """Everything so far, thinned out."""
        return {
            plot: {line: curve.points() for line, curve in curves.items()}
            for plot, curves in self._curves.items()
        }

    def axes(self, history: TrainingHistory) -> dict[str, Any]:
        """Ends and labelled ticks of each axis, and the epochs as bands along the steps."""
        lows_highs = [(c.low, c.high) for c in self._curves["loss"].values() if c.low <= c.high]
        # The axis begins at 0, unless a loss is negative: a likelihood may be.
        low = min([0.0, *(low for low, _ in lows_highs)])
        high = max((high for _, high in lows_highs), default=1.0)
        return {
            # The steps so far count where nobody knows how many there will be.
            "steps": step_axis(max(history.num_steps, self._num_steps, 1)),
            "y": {
                "accuracy": {"low": 0, "high": 100, "ticks": ACCURACY_TICKS},
                "loss": nice_axis(low, high),
            },
            "bands": self._bands(history),
            "best": best_point(history.best),
        }

    def has(self, plot: str) -> bool:
        """Whether a plot has a point."""
        return any(curve.low <= curve.high for curve in self._curves[plot].values())

    def _bands(self, history: TrainingHistory) -> list[tuple[int, int, str]]:
        """Those of `epoch_bands`, made once a start."""
        if history.start is not self._banded:
            self._banded, self._epoch_bands = history.start, epoch_bands(history)
        return self._epoch_bands

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
    # `ceil` makes 2.5 a 3: no tick stands between two steps.
    return list(range(0, num_steps + 1, math.ceil(nice_step(num_steps, 6))))


@functools.lru_cache(maxsize=8)
def step_axis(num_steps: int) -> dict[str, Any]:
    """The axis of so many steps; not to be changed, as it is kept."""
    ticks = [(tick, words.number(tick)) for tick in step_ticks(num_steps)]
    return {"low": 0, "high": num_steps, "ticks": ticks}


# Kept: a live monitor asks many times a second, and the ends change now and then.
@functools.lru_cache(maxsize=8)
def nice_axis(low: float, high: float) -> dict[str, Any]:
    """An axis that begins and ends on a tick and holds both values; not to be changed."""
    if high <= low:
        high = low + 1.0
    step = nice_step(high - low, 5)
    # The small terms: 0.3 / 0.1 is 2.999..., which would add a tick that nobody needs.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Through text: 3 * 0.1 is 0.30000000000000004, and would stand so beside the plot.
    ticks = [float(f"{i * step:.12g}") for i in range(first, last + 1)]
    return {"low": ticks[0], "high": ticks[-1], "ticks": labelled(ticks)}


def epoch_bands(history: TrainingHistory) -> list[tuple[int, int, str]]:
    """(first step, last step, label) of at most a dozen bands; many epochs share a band."""
    if history.start is None:
        return []
    per_epoch, num_steps = history.start.steps_per_epoch, history.num_steps
    if not per_epoch:  # of a stream nobody knows
        return []
    num_epochs = math.ceil(num_steps / per_epoch)  # `max_steps` may end it before all epochs
    size = 1 if num_epochs <= MAX_BANDS else math.ceil(nice_step(num_epochs, MAX_SHARED_BANDS))
    bands = []
    for first in range(1, num_epochs + 1, size):
        last = min(first + size - 1, num_epochs)
        label = str(first) if first == last else f"{first}–{last}"
        if first == 1:
            label = ("Epoch " if size == 1 else "Epochs ") + label
        bands.append(((first - 1) * per_epoch, min(last * per_epoch, num_steps), label))
    return bands


def best_point(best: ValidationEvent | None) -> dict[str, Any] | None:
    """Where the best checkpoint is ringed in each plot, with its label; None: no such plot."""
    if best is None:
        return None
    accuracy = None if best.accuracy is None else 100 * best.accuracy
    labels = {"accuracy": words.percent(best.accuracy), "loss": f"{best.loss:.4g}"}
    return {
        "step": best.step,
        "accuracy": accuracy,
        "loss": best.loss if math.isfinite(best.loss) else None,
        "labels": {plot: f"best {label}" for plot, label in labels.items()},
    }


def labelled(ticks: list[float]) -> list[tuple[float, str]]:
    """Each tick with its number as text."""
    return [(tick, tick_label(tick)) for tick in ticks]


def tick_label(tick: float) -> str:
    """A number that fits beside a plot.

    >>> tick_label(0.0025), tick_label(5000), tick_label(2.5e6), tick_label(-2e-05)
    ('0.0025', '5,000', '2.5e6', '-2e-5')
    """
    label = words.number(tick) if abs(tick) >= 1000 else f"{tick:g}"
    if "e" not in label and len(label) <= MAX_LABEL_CHARS:
        return label
    # Without "+" and zeros: "2.5e+06" has no room.
    number, power = f"{tick:.3e}".split("e")
    return f"{float(number):g}e{int(power)}"


ACCURACY_TICKS = labelled([0, 25, 50, 75, 100])
