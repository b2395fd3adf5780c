"""Accuracy and loss of a training as one drawing, with titles and legend. Pure; on the client."""

from __future__ import annotations

from typing import Any

from gpupool.notebook.monitor import svg, words
from gpupool.notebook.monitor.curves import PLOTS, Curves, Point
from gpupool.training.history import TrainingHistory

COLORS = {"accuracy": "#1a85d6", "loss": "#e0632a"}
TITLES = {"accuracy": "Accuracy (%)", "loss": "Loss"}
WIDTH, BLOCK, LEGEND = 660, 252, 26
LEFT, RIGHT, TOP, BOTTOM = 46, WIDTH - svg.MARGIN, 38, 214
MAX_POINTS = 400

Lines = dict[str, list[Point]]


class Plots:
    """The plots of a training: `inner` is SVG of `width` by `height` pixels, `label` its words."""

    def __init__(self, history: TrainingHistory) -> None:
        curves = Curves(MAX_POINTS)
        curves.take(history)
        whole, axes, latest = curves.whole(), curves.axes(history), words.latest(history)
        plots = [p for p in PLOTS if p == "loss" or any(whole[p].values())]
        drawn = [_plot(p, n * BLOCK, whole[p], axes) for n, p in enumerate(plots)]
        validated = any(whole[p]["validation"] for p in plots)
        legend = _legend(plots, len(plots) * BLOCK, validated, axes["best"] is not None)
        self.width, self.height = WIDTH, len(plots) * BLOCK + LEGEND
        self.inner = "".join([*drawn, legend])
        self.label = "; ".join(latest[p] for p in plots)

    def html(self, *, as_picture: bool) -> str:
        """For a page: what is drawn again and again as itself, what stays as a picture."""
        draw = svg.picture if as_picture else svg.drawing
        return draw(self.inner, self.width, self.height, self.label)

    def data_url(self) -> str:
        """The drawing as a file."""
        return svg.data_url(self.inner, self.width, self.height)


def _plot(plot: str, top: int, lines: Lines, axes: dict[str, Any]) -> str:
    area = svg.Area(LEFT, RIGHT, top + TOP, top + BOTTOM)
    x_axis, y_axis, color = axes["steps"], axes[plot], COLORS[plot]
    x = svg.scale(x_axis, area.left, area.right)
    y = svg.scale(y_axis, area.bottom, area.top)
    title = svg.text(0, top + 14, TITLES[plot], "start", ' font-weight="600" font-size="13"')
    return "".join(
        [
            title,
            svg.bands(area, axes["bands"], x),
            svg.ticks(area, x_axis, y_axis, x, y),
            svg.polyline(lines["raw"], x, y, f'stroke="{color}" stroke-opacity=".45"'),
            svg.polyline(lines["smooth"], x, y, f'stroke="{color}" stroke-width="2"'),
            svg.polyline(lines["validation"], x, y, 'stroke="currentColor" stroke-dasharray="5 4"'),
            svg.markers(lines["validation"], x, y),
            _dot(lines["raw"], x, y, color),
            svg.best(area, plot, axes["best"], x, y),
        ]
    )


def _dot(points: list[Point], x: svg.Scale, y: svg.Scale, color: str) -> str:
    """The only step so far, of which no line can be drawn."""
    return f'<g color="{color}">{svg.markers(points, x, y)}</g>' if len(points) == 1 else ""


def _legend(plots: list[str], top: int, validated: bool, has_best: bool) -> str:
    entries = [
        ("training (smoothed)", _samples(plots, 'stroke-width="2.5"')),
        ("training", _samples(plots, 'stroke-opacity=".5"')),
    ]
    if validated:
        dashes = '<line x2="24" stroke="currentColor" stroke-dasharray="5 4"/>'
        entries.append(("validation", dashes + '<circle cx="12" r="3"/>'))
    if has_best:
        entries.append(("best", svg.ring(12, 0, 5.5)))
    out, left = [], 0.0
    for label, sign in entries:
        words_ = svg.text(30, 4, label, "start", ' font-size="12"')
        out.append(f'<g transform="translate({left:.0f},{top + 14})">{sign}{words_}</g>')
        left += 56 + 6.6 * len(label)
    return "".join(out)


def _samples(plots: list[str], style: str) -> str:
    size = 24 / len(plots)
    return "".join(
        f'<line x1="{n * size:g}" x2="{(n + 1) * size:g}" stroke="{COLORS[plot]}" {style}/>'
        for n, plot in enumerate(plots)
    )
