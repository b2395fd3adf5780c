"""The curves of a training or a loop, thinned, with their axes, as data. Pure; on the client."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np

from gpupool.core.formatting import is_share, percent, short_name
from gpupool.core.monitor_lines import monitor_line
from gpupool.core.options.named_measures import less_is_better
from gpupool.core.wire.events import OVER, MonitorEvent, StepEvent, ValidationEvent
from gpupool.notebook.monitor.plots import fitted_end, legend, own_plot, training_plot
from gpupool.training.history import TrainingHistory, figure

Point = tuple[int, float]
# plot -> line -> points; of a training "accuracy" (in percent), "loss" and one for each metric.
# "raw" and "validation" have `Point`s, "mean" what `Curve.means` says, for a smooth line.
Lines = dict[str, dict[str, list[Any]]]
View = dict[str, Any]

MAX_POINTS = 300  # of a line
_MOST, _LEAST = 1e300, 1e-300  # beyond them, axes could not be computed
_MAX_TITLE = 48  # characters there is room for above a plot
_NAMES = {"accuracy": "Accuracy", "loss": "Loss"}  # of the plots of each step


class Curve:
    """A line that grows, thinned.

    Where points are too many, neighbours share a place. Its lowest and its highest are kept, so
    that one spike among 100 000 steps is still seen; and the very last point. NaN and infinity have
    no place on an axis, and are left out.

    What has been kept is thinned again together with what is new. That finds the same as to thin
    all, and costs as much for a long line as for a short one.
    """

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points, self._width = max_points, 1
        self.num_points = 0  # before they were thinned
        self._kept = np.empty((0, 3))  # which of all points it is, its step, its value
        self._sums = np.empty((0, 3))  # of each place: its last step, sum, number of points

    def extend(self, values: Mapping[int, float | None]) -> None:
        """Add points, by their steps, which come in order."""
        new = np.array([[*values], [*values.values()]], np.float64)  # None is NaN
        new = new[:, np.isfinite(new[1])].clip(-_MOST, _MOST)
        new[1, np.abs(new[1]) <= _LEAST] = 0.0
        num = new.shape[1]
        if not num:
            return
        numbers = np.arange(self.num_points, self.num_points + num)
        self.num_points += num
        # A power of two, so that the places stay where they are while the curve grows.
        most, num_places = self._max_points, (self._max_points - 1) // 2
        while self.num_points > max(most, num_places * self._width):
            self._width *= 2
        kept = np.vstack([self._kept, np.column_stack([numbers, *new])])
        places = kept[:, 0] // self._width
        by_value, (firsts, lasts) = np.lexsort((kept[:, 2], places)), _ends(places)
        extremes = by_value[np.concatenate([firsts, lasts])]
        self._kept = kept[np.unique(np.append(extremes, len(kept) - 1))]
        sums = np.vstack([self._sums, np.column_stack([*new, np.ones(num)])])
        firsts, lasts = _ends((sums[:, 2].cumsum() - 1) // self._width)
        self._sums = np.add.reduceat(sums, firsts)
        self._sums[:, 0] = sums[lasts, 0]

    @property
    def highest(self) -> float:
        return float(self._kept[:, 2].max(initial=0.0))

    def points(self, scale: float = 1) -> list[Point]:
        _, steps, values = self._kept.T
        return [*zip(steps.astype(int).tolist(), _rounded(scale * values), strict=True)]

    def means(self, scale: float = 1) -> list[tuple[int, float, int]]:
        """Of each place its last step, the mean over it, and how many points it is of."""
        steps, sums, counts = self._sums.T
        means = _rounded(scale * sums / counts)
        return [*zip(steps.astype(int).tolist(), means, counts.astype(int).tolist(), strict=True)]


def _ends(places: Any) -> tuple[Any, Any]:
    """Where each run of equal ones begins, and its last."""
    firsts = np.flatnonzero(np.diff(places, prepend=-1))
    return firsts, np.append(firsts[1:], len(places)) - 1


def _rounded(values: Any) -> list[float]:
    """In as many digits as pixels can show."""
    sizes = np.abs(values)
    factors = 10.0 ** (4 - np.floor(np.log10(np.where(sizes > 0, sizes, 1.0))))
    rounded: list[float] = (np.round(values * factors) / factors).tolist()
    return rounded


class TrainingCurves:
    """The curves of a training: each time they are asked for, they take in what is new."""

    def __init__(self) -> None:
        self._steps: list[StepEvent] = []
        self._validations: list[ValidationEvent] = []
        self._num_steps = self._num_validations = 0  # that are taken in
        self._curves: dict[str, dict[str, Curve]] = {}

    def _take(self, history: TrainingHistory) -> None:
        """Take in what is new; all, where the training has begun again."""
        start, steps, validations = history.start, history.steps, history.validations
        if self._steps is not steps or self._validations is not validations:
            self._steps, self._validations = steps, validations
            self._num_steps = self._num_validations = 0
            self._curves = {plot: {"raw": Curve(), "validation": Curve()} for plot in _NAMES}
        new, told = steps[self._num_steps :], validations[self._num_validations :]
        self._num_steps += len(new)
        self._num_validations += len(told)
        for plot in _NAMES:
            curves = self._curves[plot]
            curves["raw"].extend({one.step: getattr(one, plot) for one in new})
            curves["validation"].extend({one.step: getattr(one, plot) for one in told})
        # Plots of metrics are there from the beginning, so that nothing jumps when values come.
        names = start.metrics if start and start.validate_every else ()
        found: dict[str, dict[int, float]] = {name: {} for name in names if name != "accuracy"}
        for one in told:
            for name, value in one.metrics.items():
                # The accuracy has a plot of its own, where there are classes.
                if name != "accuracy" or one.accuracy is None:
                    found.setdefault(name, {})[one.step] = value
        for name, values in found.items():
            # With a prefix: a function of the user's may be called "loss".
            curves = self._curves.setdefault(f"metric:{name}", {"validation": Curve()})
            curves["validation"].extend(values)

    def plots(self, history: TrainingHistory) -> tuple[View, Lines]:
        self._take(history)
        lasts = [one.step for one in history.steps[-1:]]
        lasts += [one.step for one in history.validations[-1:]]
        end = fitted_end(max(lasts, default=0), history.num_steps, is_over=history.is_over)
        looks, latest, best = [], {}, {}
        lines: Lines = {}
        has_steps = any(curve.num_points for curve in self._curves["loss"].values())
        for plot, curves in self._curves.items():
            # Before the first step nobody knows whether there is an accuracy.
            if plot == "accuracy" and has_steps and not any(c.num_points for c in curves.values()):
                continue
            name, per_step = _NAMES.get(plot, plot.removeprefix("metric:")), "raw" in curves
            # A user's function of the name of a share may count in percent already.
            highest = max(curve.highest for curve in curves.values())
            is_part = plot != "loss" and is_share(name) and highest <= 1
            scale, words = (100, _percent) if is_part else (1, figure)
            lines[plot] = {line: curve.points(scale) for line, curve in curves.items()}
            ends = [points[-1] for points in lines[plot].values() if points]
            latest[plot] = f"{name}: no value yet"
            if ends:
                latest[plot] = f"{name} at step {ends[0][0]}: {words(ends[0][1])}"
            if len(ends) > 1:
                latest[plot] += f", validation {words(ends[1][1])}"
            if per_step:
                lines[plot]["mean"] = curves["raw"].means(scale)
            title = short_name(name, _MAX_TITLE) + " (%)" * is_part
            looks.append(training_plot(plot, title, "%" * is_part, has_steps=per_step))
            if ringed := _best(plot, lines[plot]["validation"], history, scale):
                label = f"best {words(ringed[1])}"
                best[plot] = {"step": ringed[0], "value": ringed[1], "label": label}
                latest[plot] += f", {label} at step {ringed[0]}"
        entries = legend(looks, validated=bool(history.validations), has_best=bool(best))
        per_epoch = history.start.steps_per_epoch if history.start else 0
        axes = {"steps": {"low": 0, "high": end, "per_epoch": per_epoch}, "best": best}
        return {"plots": looks, "legend": entries, "axes": axes, "latest": latest}, lines


def _best(plot: str, told: list[Point], history: TrainingHistory, scale: float) -> Point | None:
    """What is ringed: the best checkpoint, and of each metric its own best value."""
    if plot not in _NAMES:
        pick = min if less_is_better(plot.removeprefix("metric:")) else max
        return pick(told, key=lambda point: point[1], default=None)
    best = history.best
    value = getattr(best, plot, None)
    return (best.step, scale * value) if best and value is not None and isfinite(value) else None


def _percent(value: float) -> str:
    return percent(value / 100)


class LoopHistory:
    """One monitor: its last event, the last value of each metric, and their curves.

    `hears_stop`: somebody waits for the loop, and passes on the press of a Stop button.
    """

    def __init__(self, event: MonitorEvent, *, hears_stop: bool = False) -> None:
        self.event, self.hears_stop = event, hears_stop
        self.started_at = time.time()
        self.step = 0
        self.first: int | None = None
        self.latest: dict[str, float] = {}
        self._curves: dict[str, Curve] = {}
        self._status = ""

    def add(self, event: MonitorEvent) -> None:
        """Add the next event, also one that comes after the end of the cell."""
        self.event, self._status = event, ""
        new: defaultdict[str, dict[int, float]] = defaultdict(dict)
        for step, _, values in event.rows:
            self.step = max(self.step, step)
            self.first = step if self.first is None else min(self.first, step)
            self.latest |= values
            for name, value in values.items():
                new[name][step] = value
        for name, found in new.items():
            self._curves.setdefault(name, Curve()).extend(found)

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
        return bool(self._status) or self.event.status in OVER

    @property
    def can_stop(self) -> bool:
        return self.hears_stop and self.event.heeds_stop and not self.is_over

    @property
    def progress(self) -> float | None:
        num_steps = self.event.num_steps
        return min(1.0, self.step / num_steps) if num_steps else None

    def line(self) -> str:
        line = monitor_line(self.event, self.step, self.latest)
        return line if self.status == self.event.status else f"{line}, {self.status}"

    def plots(self) -> tuple[View, Lines]:
        """Looks and axes of all plots, which are named "0", "1", ... in their order; all lines."""
        groups = self.event.groups
        looks = [own_plot(str(n), *group) for n, group in enumerate(groups.items())]
        lines: Lines = {}
        latest = {}
        for n, (title, names) in enumerate(groups.items()):
            lines[str(n)] = {
                str(k): self._curves.get(name, Curve()).points() for k, name in enumerate(names)
            }
            values = [f"{name} {self.latest[name]:.4g}" for name in names if name in self.latest]
            latest[str(n)] = f"{title}: {', '.join(values)}"
        first, plan = self.first or 0, self.event.num_steps
        # A loop that continues from a checkpoint would be drawn at the right edge alone.
        start = first if 0 < self.step < 4 * first and self.step > first else 0
        end = start + fitted_end(self.step - start, plan - start, is_over=self.is_over)
        axes = {"steps": {"low": start, "high": end, "per_epoch": 0}, "best": {}}
        return {"plots": looks, "legend": legend(looks), "axes": axes, "latest": latest}, lines
