"""Curves, and all those of a training with their axes, as plain data. Pure; runs on the client.

Points are kept in plain arrays, and thinned out when a picture is made of them.
"""

from __future__ import annotations

from array import array
from math import isfinite
from typing import TYPE_CHECKING, Any

from gpupool.core.formatting import is_share, percent, short_name
from gpupool.core.options.named_measures import less_is_better
from gpupool.core.wire.events import StartEvent
from gpupool.notebook.monitor.plots import legend, training_plot
from gpupool.notebook.monitor.svg import fitted_end
from gpupool.training.history import TrainingHistory, figure

if TYPE_CHECKING:
    from numpy.typing import NDArray

Point = tuple[int, float]
Mean = tuple[int, float, int]  # the last step of some, the mean over them, how many they are
# plot -> line -> points; of a training "accuracy" (in percent), "loss" and one for each metric.
# "raw" and "validation" have `Point`s, "mean" has `Mean`s, from which a smooth line is drawn.
Lines = dict[str, dict[str, list[Any]]]
View = dict[str, Any]

MAX_POINTS = 300  # of a line
_MOST, _LEAST = 1e300, 1e-300  # beyond them, axes could not be computed
_MAX_TITLE = 48  # characters there is room for above a plot
_NAMES = {"accuracy": "Accuracy", "loss": "Loss"}  # of the plots of each step


class Curve:
    """One line. NaN and infinity have no place on an axis, and are left out."""

    def __init__(self) -> None:
        self._steps, self._values = array("q"), array("d")

    def __len__(self) -> int:
        return len(self._values)

    def add(self, step: int, value: float | None) -> None:
        """Append a point."""
        if value is not None and isfinite(value):
            self._steps.append(step)
            self._values.append(max(-_MOST, min(value, _MOST)) if abs(value) > _LEAST else 0.0)

    def thinned(self, max_points: int = MAX_POINTS) -> tuple[list[Point], list[Mean]]:
        """What is to be drawn, in the order of steps, and means, of which smoothing is made.

        Where points are too many, neighbours share a place. Its lowest and its highest are kept, so
        that one spike among 100 000 steps is still seen; and the very last point.
        """
        import numpy as np

        # Copies: an array that numpy looks into could not grow in another thread.
        steps = np.frombuffer(self._steps.tobytes(), np.int64)
        values = np.frombuffer(self._values.tobytes(), np.float64)
        num, width = min(len(steps), len(values)), 1
        if not num:
            return [], []
        # A power of two, so that the places stay where they are while the curve grows.
        while num > max_points and num > (max_points - 1) // 2 * width:
            width *= 2
        values, firsts = values[:num], np.arange(0, num, width)
        # The last place is filled with its last value, which comes before what fills it.
        places = np.pad(values, (0, -num % width), mode="edge").reshape(-1, width)
        extremes = np.concatenate([firsts + places.argmin(1), firsts + places.argmax(1), [num - 1]])
        kept, lasts = np.unique(extremes), np.append(firsts[1:], num) - 1
        counts = np.diff(lasts, prepend=-1)
        means = _points(steps[lasts], np.add.reduceat(values, firsts) / counts)
        return _points(steps[kept], values[kept]), [
            (*mean, count) for mean, count in zip(means, counts.tolist(), strict=True)
        ]


def _points(steps: NDArray[Any], values: NDArray[Any]) -> list[Point]:
    """In as many digits as pixels can show."""
    return [(n, float(f"{v:.5g}")) for n, v in zip(steps.tolist(), values.tolist(), strict=True)]


class Curves:
    """The curves of a training, filled from its history as that grows."""

    def __init__(self) -> None:
        self._start: StartEvent | None = None
        self._begin()

    def _begin(self) -> None:
        self._curves = {plot: {"raw": Curve(), "validation": Curve()} for plot in _NAMES}
        self._num_steps = self._num_validations = self._last_step = 0

    def take(self, history: TrainingHistory) -> tuple[View, Lines]:
        """Add what is new in `history`; returns looks and axes of all plots, and all lines."""
        start = history.start
        # Else the curves of an attempt that was lost would be drawn below the new ones.
        if self._start is not None and start is not self._start:
            self._begin()
        self._start = start
        # Their plots are there from the beginning, so that nothing jumps when values come.
        for name in start.metrics if start and start.validate_every else ():
            if name != "accuracy":  # which has a plot of its own, where there are classes
                self._metric(name)
        steps = history.steps[self._num_steps :]
        validations = history.validations[self._num_validations :]
        self._num_steps += len(steps)
        self._num_validations += len(validations)
        for event in steps:
            self._add("raw", event.step, event.loss, event.accuracy)
        for one in validations:
            self._add("validation", one.step, one.loss, one.accuracy)
            for name, value in one.metrics.items():
                if name != "accuracy" or one.accuracy is None:
                    self._metric(name).add(one.step, value)
        return self._drawn(history)

    def _add(self, line: str, step: int, loss: float, accuracy: float | None) -> None:
        self._curves["loss"][line].add(step, loss)
        self._curves["accuracy"][line].add(step, accuracy)
        self._last_step = max(self._last_step, step)

    def _metric(self, name: str) -> Curve:
        # With a prefix: a function of the user's may be called "loss".
        curves = self._curves.setdefault(f"metric:{name}", {"validation": Curve()})
        return curves["validation"]

    def _drawn(self, history: TrainingHistory) -> tuple[View, Lines]:
        end = fitted_end(self._last_step, history.num_steps, is_over=history.is_over)
        per_epoch = history.start.steps_per_epoch if history.start else 0
        looks, latest, lines, best = [], {}, {}, {}
        has_steps = any(map(len, self._curves["loss"].values()))
        for plot, curves in self._curves.items():
            # Before the first step nobody knows whether there is an accuracy.
            if plot == "accuracy" and has_steps and not any(map(len, curves.values())):
                continue
            name = _NAMES.get(plot, plot.removeprefix("metric:"))
            thinned = {line: curve.thinned() for line, curve in curves.items()}
            points: dict[str, list[Any]] = {line: drawn for line, (drawn, _) in thinned.items()}
            highest = max((value for some in points.values() for _, value in some), default=0)
            # A user's function of the name of a share may count in percent already.
            is_part = plot != "loss" and is_share(name) and highest <= 1
            scale, words = (100, percent) if is_part else (1, figure)
            if "raw" in curves:
                points["mean"] = thinned["raw"][1]
            lines[plot] = points
            if is_part:
                lines[plot] = {line: _percents(some) for line, some in points.items()}
            title = short_name(name, _MAX_TITLE) + " (%)" * is_part
            looks.append(training_plot(plot, title, "%" * is_part, has_steps="raw" in curves))
            ringed = _best(plot, name, points["validation"], history)
            if ringed is not None:
                value, label = scale * ringed[1], f"best {words(ringed[1])}"
                best[plot] = {"step": ringed[0], "value": value, "label": label}
            kind = "step" if "raw" in curves else "validation"
            first = points.get("raw", points["validation"])
            latest[plot] = f"{name}: no {kind} yet"
            if first:
                step, now = first[-1]
                latest[plot] = f"{name} at step {step}: {words(now)}"
            if "raw" not in curves and ringed is not None:
                latest[plot] += f", best {words(ringed[1])} at step {ringed[0]}"
            elif "raw" in curves and points["validation"]:
                latest[plot] += f", validation {words(points['validation'][-1][1])}"
        entries = legend(looks, validated=bool(history.validations), has_best=bool(best))
        axes = {"steps": {"low": 0, "high": end, "per_epoch": per_epoch}, "best": best}
        return {"plots": looks, "legend": entries, "axes": axes, "latest": latest}, lines


def _percents(points: list[Any]) -> list[Any]:
    return [(step, round(100 * value, 3), *rest) for step, value, *rest in points]


def _best(plot: str, name: str, validations: list[Point], history: TrainingHistory) -> Point | None:
    """What is ringed: the best checkpoint, and of each metric its own best value."""
    if plot in _NAMES:
        best = history.best
        if best is None:
            return None
        value = best.accuracy if plot == "accuracy" else best.loss
        return (best.step, value) if value is not None and isfinite(value) else None
    pick = min if less_is_better(name) else max
    return pick(validations, key=lambda point: point[1], default=None)
