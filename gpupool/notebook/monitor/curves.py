"""Curves as bounded plain data, and all those of a training with their axes. Pure; on the client.

The live monitor (`widget.py`) sends them to the browser, the final picture (`picture.py`) turns
them into SVG.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from gpupool.core.formatting import is_share, percent, short_name
from gpupool.core.options.named_measures import less_is_better
from gpupool.core.wire.events import StartEvent, ValidationEvent
from gpupool.notebook.monitor.svg import fitted_end
from gpupool.training.history import TrainingHistory, figure

Point = tuple[int, float]
Mean = tuple[int, float, int]  # the last step of some, the mean over them, how many they are
# plot -> line -> points; of a training "accuracy" (in percent), "loss" and one for each metric.
# "raw" and "validation" have `Point`s, "mean" has `Mean`s, from which `smoothed` is drawn.
Lines = dict[str, dict[str, list[Any]]]

LINES = ("raw", "mean", "validation")
_MOST, _LEAST = 1e300, 1e-300  # beyond them, axes could not be computed
_MAX_TITLE = 48  # characters there is room for above a plot


class _Bucket(NamedTuple):
    """Some neighbouring steps: their lowest and highest point, sum, number and last step."""

    low: Point
    high: Point
    total: float
    num: int
    last: int

    def and_(self, other: _Bucket) -> _Bucket:
        """Both as one."""
        return _Bucket(
            other.low if other.low[1] < self.low[1] else self.low,
            other.high if other.high[1] > self.high[1] else self.high,
            self.total + other.total,
            self.num + other.num,
            other.last,
        )


class Curve:
    """One line in at most `max_points` points, however many are added.

    Steps fall into buckets of equal length. A bucket keeps its lowest and its highest value, so
    that one spike among 100 000 steps is still seen, and the mean, of which smoothing is made. When
    the buckets become too many, each two neighbours become one.
    """

    def __init__(self, max_points: int = 600) -> None:
        # Two points a bucket, its lowest and highest, and the very last point.
        self._max_buckets = (max_points - 1) // 2
        self._width = 1
        self._buckets: dict[int, _Bucket] = {}
        self._last: Point | None = None
        self.count = 0
        self.low = math.inf
        self.high = -math.inf

    def add(self, step: int, value: float) -> None:
        """Append a point."""
        self._last = point = (step, value)
        self.count += 1
        self.low, self.high = min(self.low, value), max(self.high, value)
        self._put(step // self._width, _Bucket(point, point, value, 1, step))
        if len(self._buckets) > self._max_buckets:
            # Neighbours are joined in pairs, so a point costs the same after any number of steps.
            self._width *= 2
            old, self._buckets = self._buckets, {}
            for index, bucket in old.items():
                self._put(index // 2, bucket)

    def points(self) -> list[Point]:
        """What is to be drawn, in the order of steps, up to the very last point."""
        points: list[Point] = []
        for low, high, *_ in self._buckets.values():
            # Points compare by step first: the two of a bucket are drawn in their order.
            points += (low,) if low is high else (low, high) if low < high else (high, low)
        if self._last and points[-1] != self._last:
            points.append(self._last)
        return points

    def means(self) -> list[Mean]:
        """The mean of each bucket, which `points` lack: extremes say nothing of the middle."""
        return [
            (bucket.last, shown(bucket.total / bucket.num), bucket.num)
            for bucket in self._buckets.values()
        ]

    def _put(self, index: int, bucket: _Bucket) -> None:
        old = self._buckets.get(index)
        self._buckets[index] = bucket if old is None else old.and_(bucket)


def shown(value: float) -> float:
    """A finite value in as many digits as pixels can show, within what axes can be computed of."""
    if not _LEAST < abs(value) < _MOST:
        return 0.0 if abs(value) <= _LEAST else math.copysign(_MOST, value)
    return float(f"{value:.5g}")


class Measure(NamedTuple):
    """What one plot of a training shows: the accuracy, the loss, or a metric of validations."""

    plot: str  # "accuracy", "loss", "metric:f1"
    name: str
    has_steps: bool  # or only validations
    whole: float  # shares are drawn in percent: 100, else 0
    less_is_better: bool

    @property
    def title(self) -> str:
        """What stands above the plot."""
        name = short_name(self.name, _MAX_TITLE)
        return f"{name} (%)" if self.whole else name

    def words(self, value: float | None) -> str:
        """A value that is drawn, as text."""
        if self.whole and value is not None:
            return percent(value / self.whole)
        return figure(value)


_ACCURACY = Measure("accuracy", "Accuracy", True, 100, False)
_LOSS = Measure("loss", "Loss", True, 0, True)


class _Plot:
    """The curves of one measure, their axis, and the best validation of it."""

    def __init__(self, measure: Measure, max_points: int) -> None:
        self.measure, self._max_points = measure, max_points
        names = ("raw", "validation") if measure.has_steps else ("validation",)
        self._curves = {name: Curve(max_points) for name in names}
        # Kept until a point comes: of a dozen metrics that is once a validation.
        self._whole: dict[str, list[Any]] | None = None
        self._last: Point | None = None
        self.best: Point | None = None

    def point(self, step: int, value: float | None) -> Point | None:
        """Where a value is drawn; NaN and infinity have no place on an axis."""
        if value is None or not math.isfinite(value):
            return None
        return (step, shown(value * (self.measure.whole or 1)))

    def add(self, line: str, step: int, value: float | None) -> list[Point]:
        """Add a value; returns the point, if there is one."""
        point = self.point(step, value)
        if point is None:
            return []
        self._curves[line].add(*point)
        self._last, best = point, self.best
        self._whole = None
        sign = -1 if self.measure.less_is_better else 1
        if line == "validation" and (best is None or sign * point[1] > sign * best[1]):
            self.best = point
        return [point]

    def whole(self) -> dict[str, list[Any]]:
        """Everything so far, thinned out; the same object until a point comes."""
        if self._whole is None:
            self._whole = {name: curve.points() for name, curve in self._curves.items()}
            if self.measure.has_steps:
                self._whole["mean"] = self._curves["raw"].means()
        return self._whole

    def has_points(self) -> bool:
        """Whether there is something to draw."""
        return self._last is not None

    def latest(self) -> str:
        """The last value and the best one, in words."""
        if self._last is None or self.best is None:
            return f"{self.measure.name}: no validation yet"
        now, best = self.measure.words(self._last[1]), self.measure.words(self.best[1])
        last = f"{self.measure.name} at step {self._last[0]}: {now}"
        return f"{last}, best {best} at step {self.best[0]}"


class Curves:
    """All plots of one training, filled from its history as that grows."""

    def __init__(self, max_points: int = 600) -> None:
        self._max_points = max_points
        self._start: StartEvent | None = None
        self._begin()

    def _begin(self) -> None:
        self._plots = {one.plot: _Plot(one, self._max_points) for one in (_ACCURACY, _LOSS)}
        self._num_steps = 0
        self._num_validations = 0
        self._last_step = 0

    def take(self, history: TrainingHistory) -> Lines:
        """Add what is new in `history`; returns just that.

        A training that has started again reports everything again, see `is_of_another`.
        """
        # Else the curves of the lost attempt would be drawn below the new ones.
        if self.is_of_another(history):
            self._begin()
        if history.start is not None and history.start is not self._start:
            # Their plots are there from the beginning, so that nothing jumps when values come.
            for name in history.start.metrics if history.start.validate_every else ():
                if name != "accuracy":  # which has a plot of its own, where there are classes
                    self._metric(name)
        self._start = history.start
        new: Lines = {plot: {line: [] for line in LINES} for plot in ("accuracy", "loss")}
        steps = history.steps[self._num_steps :]
        validations = history.validations[self._num_validations :]
        self._num_steps += len(steps)
        self._num_validations += len(validations)
        for step in steps:
            for plot, value in (("loss", step.loss), ("accuracy", step.accuracy)):
                if points := self._plots[plot].add("raw", step.step, value):
                    new[plot]["raw"] += points
                    new[plot]["mean"] += [(*point, 1) for point in points]
        for event in validations:
            values = {"loss": event.loss, "accuracy": event.accuracy, **self._metrics(event)}
            for plot, value in values.items():
                lines = new.setdefault(plot, {"validation": []})
                lines["validation"] += self._plots[plot].add("validation", event.step, value)
        last = [s.step for s in steps[-1:]] + [v.step for v in validations[-1:]]
        self._last_step = max([self._last_step, *last])
        return new

    def is_of_another(self, history: TrainingHistory) -> bool:
        """Whether the points so far are of an attempt before the one that `history` is of now."""
        return self._start is not None and history.start is not self._start

    def whole(self) -> Lines:
        """Everything so far, thinned out."""
        return {name: plot.whole() for name, plot in self._plots.items()}

    def measures(self) -> list[Measure]:
        """What the plots show, in their order.

        Without class labels there is no accuracy, and no empty plot of it. Before the first step
        it is there, as nobody knows whether there will be one.
        """
        has_any, has_accuracy = (self._plots[n].has_points() for n in ("loss", "accuracy"))
        plots = [plot.measure for plot in self._plots.values()]
        return plots if has_accuracy or not has_any else plots[1:]

    def axes(self, history: TrainingHistory) -> dict[str, Any]:
        """The ends of the axis of steps, how many an epoch has, and the best of each plot."""
        per_epoch = history.start.steps_per_epoch if history.start else 0
        end = fitted_end(self._last_step, history.num_steps, is_over=history.is_over)
        return {
            "steps": {"low": 0, "high": end, "per_epoch": per_epoch},
            "best": self._best(history.best),
        }

    def latest(self) -> dict[str, str]:
        """What each plot of a metric shows, in words."""
        return {n: p.latest() for n, p in self._plots.items() if not p.measure.has_steps}

    def _best(self, best: ValidationEvent | None) -> dict[str, Any]:
        """By plot, what is ringed: {"step", "value", "label"}.

        The accuracy and the loss of the best checkpoint, and of each metric its own best value.
        """
        points = {n: p.best for n, p in self._plots.items() if not p.measure.has_steps}
        if best is not None:
            points["accuracy"] = self._plots["accuracy"].point(best.step, best.accuracy)
            points["loss"] = self._plots["loss"].point(best.step, best.loss)
        return {
            name: {
                "step": point[0],
                "value": point[1],
                "label": f"best {self._plots[name].measure.words(point[1])}",
            }
            for name, point in points.items()
            if point is not None
        }

    def _metrics(self, event: ValidationEvent) -> dict[str, float]:
        return {
            self._metric(name, value): value
            for name, value in event.metrics.items()
            if name != "accuracy" or event.accuracy is None
        }

    def _metric(self, name: str, value: float = 0.0) -> str:
        """The name of the plot of a metric, which is made where there is none."""
        # With a prefix: a function of the user's may be called "loss".
        plot = f"metric:{name}"
        old = self._plots.get(plot)
        # A user's function of that name may count in percent already.
        whole = 100 if is_share(name) and not value > 1 else 0
        if old is None or (whole != old.measure.whole and not old.has_points()):
            measure = Measure(plot, name, False, whole, less_is_better(name))
            self._plots[plot] = _Plot(measure, self._max_points)
        return plot
