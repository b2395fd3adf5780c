"""The plots of a monitor as one drawing, with titles and legend. Pure; runs on the client."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gpupool.notebook.drawing import styles, svg
from gpupool.notebook.drawing.axes import Axis
from gpupool.notebook.drawing.styles import Style
from gpupool.notebook.monitor.curves import HALF_LIFE, Lines, Mean, smoothed
from gpupool.notebook.monitor.widget_state import View

COLORS = {"accuracy": "#1a85d6", "loss": "#e0632a", "text": "currentColor"}
WIDTH, NARROW, GAP = 660, 420, 24  # of the only plot; of several, in two columns
BLOCK, SMALL, LEGEND = 252, 172, 26
LEFT, TOP, BOTTOM = 46, 38, 38  # around the area of a plot


class Plots:
    """The plots of a view: `inner` is SVG of `width` by `height` pixels, `label` its words.

    Args:
        whole: all curves.
    """

    def __init__(self, view: View, whole: Lines) -> None:
        plots, axes = view["plots"], view["axes"]
        num_columns, width = (1, WIDTH) if len(plots) == 1 else (2, NARROW)
        drawn, top = [], 0
        for first in _rows(plots, num_columns):
            height = SMALL if first[0]["small"] else BLOCK
            for column, plot in enumerate(first):
                box = (column * (width + GAP), top, width, height)
                drawn.append(_plot(plot, box, whole[plot["name"]], axes))
            top += height
        self.width = num_columns * (width + GAP) - GAP
        legend, num_lines = _legend(view["legend"], top, self.width)
        self.height = top + LEGEND * num_lines
        self.inner = "".join([*drawn, legend])
        self.label = "; ".join(view["latest"][plot["name"]] for plot in plots)

    def html(self, *, as_picture: bool) -> str:
        """For a page: what is drawn again and again as itself, what stays as a picture."""
        draw = svg.picture if as_picture else svg.drawing
        return draw(self.inner, self.width, self.height, self.label)


def _rows(plots: list[Style], num_columns: int) -> Iterator[list[Style]]:
    """The plots row by row; those of metrics, which are small, begin one."""
    for is_small in (False, True):
        alike = [plot for plot in plots if plot["small"] == is_small]
        for first in range(0, len(alike), num_columns):
            yield alike[first : first + num_columns]


def _plot(
    plot: Style, box: tuple[int, int, int, int], lines: dict[str, list[Any]], axes: View
) -> str:
    left, top, width, height = box
    area = svg.Area(left + LEFT, left + width - svg.MARGIN, top + TOP, top + height - BOTTOM)
    x_axis, y_axis = axes["steps"], axes["y"][plot["name"]]
    x = svg.scale(x_axis, area.left, area.right)
    y = svg.scale(y_axis, area.bottom, area.top)
    out = [
        svg.text(left, top + 14, plot["title"], "start", ' font-weight="600" font-size="13"'),
        svg.bands(area, axes["bands"], x),
        svg.ticks(area, x_axis, y_axis, x, y, x_axis.get("name", "Step")),
    ]
    for line in plot["lines"]:
        points, color = lines[line["name"]], _color(line["color"])
        if line["name"] == "mean":
            points = _smooth(points, x_axis, y_axis)
        out.append(svg.polyline(points, x, y, _stroke(line, color)))
        # Few points get dots, as a line of one point is nothing to see.
        if 0 < len(points) <= line["dots"]:
            out.append(f'<g color="{color}">{svg.markers(points, x, y)}</g>')
    color = _color(plot["lines"][0]["color"])
    out.append(f'<g fill="{color}">{svg.clipped(area, y_axis, x)}</g>' if y_axis["clipped"] else "")
    return "".join([*out, svg.best(area, axes["best"].get(plot["name"]), x, y)])


def _smooth(means: list[Mean], x_axis: Axis, y_axis: Axis) -> list[tuple[float, float]]:
    """The smoothed line, as wide as the drawn range says; on a logarithmic axis that of powers."""
    low, high = y_axis["low"], y_axis["high"]
    half_life = HALF_LIFE * (x_axis["high"] - x_axis["low"])
    # An outlier counts as much as the edge where it is marked, or 1e31 would never be forgotten.
    within = [(step, min(max(mean, low), high), count) for step, mean, count in means]
    if not y_axis["log"]:
        return smoothed(within, half_life)
    powers = [(step, math.log10(mean), count) for step, mean, count in within]
    return [(step, 10.0**power) for step, power in smoothed(powers, half_life)]


def _legend(entries: list[Style], top: int, width: int) -> tuple[str, int]:
    """The signs of the lines with their labels, and how many rows that takes."""
    out, left, row = [], 0.0, 0
    for one in entries:
        # An estimate: SVG cannot measure text, and no browser is asked.
        wide = 56 + 6.6 * len(one["label"])
        if left and left + wide > width:
            left, row = 0.0, row + 1
        label = svg.text(30, 4, one["label"], "start", ' font-size="12"')
        place = f"translate({left:.0f},{top + 14 + LEGEND * row})"
        out.append(f'<g transform="{place}">{_sign(one)}{label}</g>')
        left += wide
    return "".join(out), row + 1 if entries else 0


def _sign(one: Style) -> str:
    if one["ring"]:
        return svg.ring(12, 0, 5.5)
    size = 24 / len(one["colors"])
    samples = [
        f'<line x1="{n * size:g}" x2="{(n + 1) * size:g}" {_stroke(one, _color(color))}/>'
        for n, color in enumerate(one["colors"])
    ]
    dot = '<circle cx="12" r="3"/>' if one["dots"] > styles.FEW else ""  # not of a few points alone
    return "".join(samples) + dot


def _stroke(style: Style, color: str) -> str:
    drawn = (
        f'stroke="{color}" stroke-width="{style["width"]:g}" stroke-opacity="{style["alpha"]:g}"'
    )
    dash = " ".join(map(str, style["dash"]))
    return f'{drawn} stroke-dasharray="{dash}"' if dash else drawn


def _color(name: str) -> str:
    return COLORS.get(name, name)
