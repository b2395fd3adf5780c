"""Several trainings in one picture: accuracy and loss, over time and over steps. Pure; client."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from gpupool.notebook.drawing import svg
from gpupool.notebook.drawing.axes import nice_axis, share_axis, value_axis
from gpupool.notebook.monitor.curves import Curve
from gpupool.notebook.page import markup
from gpupool.training.compare import smoothed
from gpupool.training.history import TrainingHistory

if TYPE_CHECKING:
    from gpupool.training.compare import Comparison

COLORS = ("#1a85d6", "#e0632a", "#2da44e", "#a855c7", "#b8860b", "#0f9d9d")
WIDTH, HEIGHT, GAP, LEFT, TOP, BOTTOM = 420, 252, 24, 46, 30, 206
_MAX_POINTS = 400
_PER_S = 1000  # points have whole numbers across: milliseconds
_ACROSS: dict[str, tuple[str, Callable[[Any], float]]] = {
    "time": ("Seconds", lambda step: step.elapsed_s),
    "steps": ("Step", lambda step: step.step),
}
_TITLES = {"accuracy": "Accuracy (%)", "loss": "Loss"}


def comparison_html(found: Comparison) -> str:
    """The picture, which stays without a script, and the table."""
    head = f"<div><b>{len(found.histories)} trainings</b></div>"
    table = markup.scroller(markup.table(found.header(), found.table()), "Options and results")
    return markup.card(head, f"{comparison_picture(found)}{table}{svg.DARK_STYLE}")


def comparison_picture(found: Comparison) -> str:
    """Plots of what was measured, beside each other: over time, over steps."""
    has_accuracy = any(s.accuracy is not None for h in found.histories for s in h.steps)
    kinds = ["accuracy", "loss"] if has_accuracy else ["loss"]
    plots = [
        _plot(found, what, across, column * (WIDTH + GAP), row * HEIGHT)
        for row, what in enumerate(kinds)
        for column, across in enumerate(_ACROSS)
    ]
    top = len(kinds) * HEIGHT
    legend = [
        f'<line x1="{LEFT}" x2="{LEFT + 24}" y1="{top + 14 + 20 * n}" y2="{top + 14 + 20 * n}" '
        f'stroke="{_color(n)}" stroke-width="2.5"/>'
        + svg.text(LEFT + 32, top + 18 + 20 * n, name, "start", ' font-size="12"')
        for n, name in enumerate(found.names)
    ]
    inner = "".join([*plots, *legend])
    label = "; ".join(", ".join(row) for row in found.rows())
    return svg.picture(inner, 2 * WIDTH + GAP, top + 20 * len(found.names) + 10, label)


def _plot(found: Comparison, what: str, across: str, left: int, top: int) -> str:
    title, at = _ACROSS[across]
    area = svg.Area(left + LEFT, left + WIDTH - svg.MARGIN, top + TOP, top + BOTTOM)
    curves = [_curve(history, what, at) for history in found.histories]
    there = [curve for curve in curves if curve.low <= curve.high]
    furthest = max((at(h.steps[-1]) for h in found.histories if h.steps), default=1.0)
    x_axis, y_axis = _axis(nice_axis(0.0, max(furthest, 1e-3))), _y_axis(what, there)
    x, y = svg.scale(x_axis, area.left, area.right), svg.scale(y_axis, area.bottom, area.top)
    out = [
        svg.text(left, top + 14, _TITLES[what], "start", ' font-weight="600" font-size="13"'),
        svg.ticks(area, x_axis, y_axis, x, y, title),
    ]
    for number, curve in enumerate(curves):
        if curve in there:
            stroke = f'stroke="{_color(number)}" stroke-width="2"'
            out.append(svg.polyline(curve.points(), x, y, stroke))
            if curve.count == 1:  # no line is to be seen
                dot = svg.markers(curve.points(), x, y)
                out.append(f'<g color="{_color(number)}">{dot}</g>')
    out.append(svg.clipped(area, y_axis, x))
    return "".join(out)


def _curve(history: TrainingHistory, what: str, at: Callable[[Any], float]) -> Curve:
    curve, factor = Curve(_MAX_POINTS), 100 if what == "accuracy" else 1
    for step, value in zip(history.steps, smoothed(history, what), strict=True):
        if value is not None and math.isfinite(value):
            curve.add(round(_PER_S * at(step)), factor * value)
    return curve


def _axis(axis: dict[str, Any]) -> dict[str, Any]:
    """An axis in the numbers of the points, with the labels of the values."""
    ticks = [(_PER_S * tick, label) for tick, label in axis["ticks"]]
    return {"low": _PER_S * axis["low"], "high": _PER_S * axis["high"], "ticks": ticks}


def _y_axis(what: str, curves: list[Curve]) -> dict[str, Any]:
    if what == "accuracy":
        return share_axis(
            min((curve.low for curve in curves), default=0.0),
            max((curve.high for curve in curves), default=100.0),
            100,
        )
    # Of the lowest curve: one that diverged must not flatten the others.
    usual = min((median(v for _, v in curve.points()) for curve in curves), default=None)
    points = [point for curve in curves for point in curve.points()]
    return value_axis(points, from_zero=True, usual=usual)


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
