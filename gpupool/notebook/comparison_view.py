"""Several trainings in one picture: accuracy and loss, over time and over steps. Pure; client.

The two columns are plots as those of a monitor, each with axes of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from gpupool.notebook.drawing import svg
from gpupool.notebook.drawing.axes import Axis, nice_axis, share_axis, step_axis, value_axis
from gpupool.notebook.drawing.styles import entry, own_plot
from gpupool.notebook.monitor.curves import Curve
from gpupool.notebook.monitor.picture import plots_html, plots_script
from gpupool.notebook.monitor.plots import Plots
from gpupool.notebook.page import markup
from gpupool.training.compare import COLUMNS, smoothed
from gpupool.training.history import TrainingHistory

if TYPE_CHECKING:
    from gpupool.training.compare import Comparison

_MAX_POINTS = 200  # a curve is in the image and in the state, over time and over steps
_PER_S = 1000  # points have whole numbers across: milliseconds
_ACROSS: dict[str, Callable[[Any], int]] = {
    "time": lambda step: round(_PER_S * step.elapsed_s),
    "steps": lambda step: int(step.step),
}
_TITLES = {"accuracy": "Accuracy (%)", "loss": "Loss"}


def comparison_html(found: Comparison) -> str:
    """The picture, which stays where no script runs, and the table."""
    head = f"<div><b>{len(found.histories)} trainings</b></div>"
    table = markup.scroller(markup.table(found.header(), found.table()), "Options and results")
    both = "".join(
        f'<div style="flex:1 1 400px;min-width:0">{_plots(found, across)}</div>'
        for across in _ACROSS
    )
    columns = f'<div style="display:flex;flex-wrap:wrap;gap:8px 24px">{both}</div>'
    return markup.card(head, f"{columns}{table}{svg.DARK_STYLE}{plots_script()}")


def _plots(found: Comparison, across: str) -> str:
    """What was measured over one of `_ACROSS`."""
    has_accuracy = any(s.accuracy is not None for h in found.histories for s in h.steps)
    kinds = ["accuracy", "loss"] if has_accuracy else ["loss"]
    curves = {
        what: [_curve(history, what, _ACROSS[across]) for history in found.histories]
        for what in kinds
    }
    # The legend says what the numbers mean.
    labels = [row[0] for row in found.table()]
    plots = []
    for what in kinds:
        plot = own_plot(what, _TITLES[what], labels)
        # A dot where a curve has one point, and no line is to be seen.
        drawn = [{**line, "dots": 1} for line in plot["lines"]]
        plots.append({**plot, "unit": "%" if what == "accuracy" else "", "lines": drawn})
    furthest = max((_ACROSS[across](h.steps[-1]) for h in found.histories if h.steps), default=1)
    view = {
        "plots": plots,
        "legend": [
            entry(name, [line]) for name, line in zip(found.names, plots[0]["lines"], strict=True)
        ],
        "axes": {
            "steps": _time_axis(furthest) if across == "time" else step_axis(furthest),
            "y": {what: _y_axis(what, curves[what]) for what in kinds},
            "bands": [],
            "best": {},
        },
        "latest": {what: _latest(found, what, across) for what in kinds},
    }
    lines = {
        what: {str(n): curve.points() if curve.count else [] for n, curve in enumerate(of_kind)}
        for what, of_kind in curves.items()
    }
    return plots_html(Plots(view, lines, stacked=True), view, lines)


def _curve(history: TrainingHistory, what: str, at: Callable[[Any], int]) -> Curve:
    curve, factor = Curve(_MAX_POINTS), 100 if what == "accuracy" else 1
    for step, value in zip(history.steps, smoothed(history, what), strict=True):
        if value is not None and math.isfinite(value):
            curve.add(at(step), factor * value)
    return curve


def _y_axis(what: str, curves: list[Curve]) -> Axis:
    there = [curve for curve in curves if curve.count]
    if what == "accuracy":
        low = min((curve.low for curve in there), default=0.0)
        return share_axis(low, max((curve.high for curve in there), default=100.0), 100)
    # Of the lowest curve: one that diverged must not flatten the others.
    usual = min((median(value for _, value in curve.points()) for curve in there), default=None)
    points = [point for curve in there for point in curve.points()]
    return value_axis(points, from_zero=True, usual=usual)


def _time_axis(furthest: int) -> Axis:
    """An axis in milliseconds with the labels of seconds."""
    axis = nice_axis(0.0, max(furthest / _PER_S, 1e-3))
    ticks = [(_PER_S * tick, label) for tick, label in axis["ticks"]]
    # Exactly to the end; `per` is what the page reads of the unit.
    shown = [(tick, label) for tick, label in ticks if tick <= max(furthest, 1)]
    named = {"name": "Seconds", "per": _PER_S, "plan": 0, "per_epoch": 0}
    return {"low": 0, "high": max(furthest, 1), "ticks": shown, **named}


def _latest(found: Comparison, what: str, across: str) -> str:
    column = COLUMNS.index(what.capitalize())
    values = [f"{name}: {row[column]}" for name, row in zip(found.names, found.rows(), strict=True)]
    return f"{what.capitalize()} over {across}, at the end {'; '.join(values)}"
