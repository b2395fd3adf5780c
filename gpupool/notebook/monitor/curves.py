"""The curves of a training, thinned out, with their axes, as plain data. Pure; on the client."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from gpupool.core.formatting import is_share, percent, short_name
from gpupool.core.options.named_measures import less_is_better
from gpupool.core.wire.events import StepEvent, ValidationEvent
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
_Curves = dict[str, tuple[list[Point], list[Mean]]]

MAX_POINTS = 300  # of a line
_MOST, _LEAST = 1e300, 1e-300  # beyond them, axes could not be computed
_MAX_TITLE = 48  # characters there is room for above a plot
_NAMES = {"accuracy": "Accuracy", "loss": "Loss"}  # of the plots of each step


def thinned(
    steps: Sequence[int], values: Sequence[float | None], max_points: int = MAX_POINTS
) -> tuple[list[Point], list[Mean]]:
    """What is to be drawn of a line, in the order of steps, and means, for its smoothing.

    Where points are too many, neighbours share a place. Its lowest and its highest are kept, so
    that one spike among 100 000 steps is still seen; and the very last point. NaN and infinity have
    no place on an axis, and are left out.
    """
    import numpy as np

    made = np.array(values, np.float64)  # None is NaN
    is_there = np.isfinite(made)
    at, made = np.array(steps, np.int64)[is_there], np.clip(made[is_there], -_MOST, _MOST)
    made[np.abs(made) <= _LEAST] = 0.0
    num, width = len(made), 1
    if not num:
        return [], []
    # A power of two, so that the places stay where they are while the curve grows.
    while num > max_points and num > (max_points - 1) // 2 * width:
        width *= 2
    firsts = np.arange(0, num, width)
    # The last place is filled with its last value, which comes before what fills it.
    places = np.pad(made, (0, -num % width), mode="edge").reshape(-1, width)
    extremes = np.concatenate([firsts + places.argmin(1), firsts + places.argmax(1), [num - 1]])
    kept, lasts = np.unique(extremes), np.append(firsts[1:], num) - 1
    counts = np.diff(lasts, prepend=-1)
    means = _points(at[lasts], np.add.reduceat(made, firsts) / counts)
    return _points(at[kept], made[kept]), [
        (*mean, count) for mean, count in zip(means, counts.tolist(), strict=True)
    ]


def _points(steps: NDArray[Any], values: NDArray[Any]) -> list[Point]:
    """In as many digits as pixels can show."""
    return [(n, float(f"{v:.5g}")) for n, v in zip(steps.tolist(), values.tolist(), strict=True)]


def _curves(history: TrainingHistory) -> dict[str, _Curves]:
    """The lines of each plot, thinned."""
    start, validations = history.start, history.validations[:]
    events: dict[str, Sequence[StepEvent | ValidationEvent]] = {
        "raw": history.steps[:],
        "validation": validations,
    }
    drawn: dict[str, _Curves] = {
        plot: {
            line: thinned([one.step for one in some], [getattr(one, plot) for one in some])
            for line, some in events.items()
        }
        for plot in _NAMES
    }
    # Plots of metrics are there from the beginning, so that nothing jumps when values come.
    names = list(start.metrics if start and start.validate_every else ())
    names += [name for one in validations for name in one.metrics]
    for name in dict.fromkeys(names):
        # The accuracy has a plot of its own, where there are classes.
        told = {
            one.step: one.metrics[name]
            for one in validations
            if name in one.metrics and (name != "accuracy" or one.accuracy is None)
        }
        if told or name != "accuracy":
            # With a prefix: a function of the user's may be called "loss".
            drawn[f"metric:{name}"] = {"validation": thinned([*told], [*told.values()])}
    return drawn


def training_plots(history: TrainingHistory) -> tuple[View, Lines]:
    """Looks and axes of all plots of a training, and all lines."""
    start, drawn = history.start, _curves(history)
    lasts = [one.step for one in history.steps[-1:]]
    lasts += [one.step for one in history.validations[-1:]]
    end = fitted_end(max(lasts, default=0), history.num_steps, is_over=history.is_over)
    looks, latest, lines, best = [], {}, {}, {}
    has_steps = any(some for some, _ in drawn["loss"].values())
    for plot, curves in drawn.items():
        # Before the first step nobody knows whether there is an accuracy.
        if plot == "accuracy" and has_steps and not any(some for some, _ in curves.values()):
            continue
        name = _NAMES.get(plot, plot.removeprefix("metric:"))
        points: dict[str, list[Any]] = {line: some for line, (some, _) in curves.items()}
        highest = max((value for some in points.values() for _, value in some), default=0)
        # A user's function of the name of a share may count in percent already.
        is_part = plot != "loss" and is_share(name) and highest <= 1
        scale, words = (100, percent) if is_part else (1, figure)
        if "raw" in curves:
            points["mean"] = curves["raw"][1]
        lines[plot] = points
        if is_part:
            lines[plot] = {
                line: [(step, round(100 * value, 3), *rest) for step, value, *rest in some]
                for line, some in points.items()
            }
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
    per_epoch = start.steps_per_epoch if start else 0
    axes = {"steps": {"low": 0, "high": end, "per_epoch": per_epoch}, "best": best}
    return {"plots": looks, "legend": entries, "axes": axes, "latest": latest}, lines


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
