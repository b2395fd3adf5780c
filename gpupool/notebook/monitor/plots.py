"""The plots of a monitor: how their lines look, and all of them as one image. Pure; client.

A plot is {"name", "title", "unit" ("%" or ""), "lines"}, which static/plots.js draws too. A line
has the name of its points, a label, a colour, a width, an opacity, dashes, and dots, if it has no
more than so many points. The points of "mean" are drawn `smoothed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from gpupool.notebook.monitor import svg

Style = dict[str, Any]

SEVERAL = 100  # dots of more validations would hide the other lines
FEW = 40  # of so few points a line would hardly be seen, of one not at all
HALF_LIFE = 0.02  # of the drawn steps: the width of smoothing unless chosen
WIDTH, NARROW, HEIGHT, LEGEND = 660, 420, 252, 26  # of the only plot; of several, in two columns
LEFT, RIGHT, TOP, BOTTOM, GAP = 46, 24, 38, 38, 18  # around the area of a plot; between two
# mid-tones, as the page may be white or nearly black; their dashes differ too
_COLORS = ("#1a85d6", "#e0632a", "#2da44e", "#a855c7", "#b58900", "#12939a")
_DASHES: tuple[list[int], ...] = ([], [7, 3], [2, 3], [9, 3, 2, 3], [4, 4], [1, 4])


def _line(name: str, label: str, color: str, **look: Any) -> Style:
    usual = {"width": 1, "alpha": 1, "dash": [], "dots": 0}
    return {"name": name, "label": label, "color": color, **usual, **look}


def training_plot(name: str, title: str, unit: str, *, has_steps: bool) -> Style:
    """A plot of a training: each step, smoothed, and validations; or these alone, of a metric."""
    color = _COLORS[0 if name == "accuracy" else 1]
    lines = [
        _line("raw", "training", color, alpha=0.4, dots=1),
        _line("mean", "smoothed", color, width=2),
        _line("validation", "validation", "currentColor", dash=[5, 4], dots=SEVERAL),
    ]
    return {"name": name, "title": title, "unit": unit, "lines": lines if has_steps else lines[2:]}


def own_plot(name: str, title: str, metrics: Sequence[str]) -> Style:
    """A plot of a loop of the user's: its lines are named "0", "1", ... and labelled so."""
    lines = []
    for n, metric in enumerate(metrics):
        # A seventh line looks like the first: more than six in one plot nobody can tell apart.
        color, dash = _COLORS[n % len(_COLORS)], _DASHES[n % len(_DASHES)]
        lines.append(_line(str(n), metric, color, width=2, dash=dash, dots=FEW))
    return {"name": name, "title": title, "unit": "", "lines": lines}


def legend(
    plots: Sequence[Style], *, validated: bool = True, has_best: bool = False
) -> list[Style]:
    """What stands below plots: each label that one with several lines has, with its colours."""
    entries: dict[str, Style] = {}
    for line in [one for plot in plots if len(plot["lines"]) > 1 for one in plot["lines"]]:
        entry = entries.setdefault(line["label"], {**line, "colors": [], "ring": False})
        if line["color"] not in entry["colors"]:
            entry["colors"].append(line["color"])
    if not validated:
        entries.pop("validation", None)
    if has_best:
        best = _line("best", "best", "currentColor")
        entries["best"] = {**best, "colors": [best["color"]], "ring": True}
    return list(entries.values())


def smoothed(
    means: Iterable[tuple[float, float, int]], half_life: float
) -> list[tuple[float, float]]:
    """A curve without its noise: at each point the weighted mean of all that has been so far.

    The weight of a step halves with each `half_life` steps. There is no value to start from, so a
    curve of three points is not drawn towards its first one.

    >>> smoothed([(1, 4.0, 1), (2, 1.0, 1)], half_life=1)
    [(1, 4.0), (2, 2.0)]
    """
    found: list[tuple[float, float]] = []
    total = weight = 0.0
    for step, mean, count in means:
        past = max(0.0, step - found[-1][0]) if found else 0.0
        kept = 0.5 ** (past / half_life)
        total, weight = kept * total + count * mean, kept * weight + count
        found.append((step, total / weight))
    return found


def image(view: dict[str, Any], lines: dict[str, dict[str, list[Any]]]) -> str:
    """The plots of a view as an image for a page; `lines` are all curves."""
    plots = view["plots"]
    num_columns, width = (1, WIDTH) if len(plots) == 1 else (2, NARROW)
    drawn = []
    for n, plot in enumerate(plots):
        row, column = divmod(n, num_columns)
        place = f"translate({column * (width + GAP) + LEFT},{row * HEIGHT + TOP})"
        inner = _plot(plot, lines[plot["name"]], view["axes"], width - LEFT - RIGHT)
        drawn.append(f'<g transform="{place}">{inner}</g>')
    width = num_columns * (width + GAP) - GAP
    legend, height = _legend(view["legend"], math.ceil(len(plots) / num_columns) * HEIGHT, width)
    label = "; ".join(view["latest"][plot["name"]] for plot in plots)
    return svg.picture("".join([*drawn, legend]), width, height, label)


def _plot(plot: Style, lines: dict[str, list[Any]], axes: dict[str, Any], right: int) -> str:
    bottom, end = HEIGHT - TOP - BOTTOM, axes["steps"]["high"]
    steps = svg.step_axis(axes["steps"]["low"], end)
    values = svg.value_axis(point[1] for points in lines.values() for point in points)
    x, y = svg.scale(steps, 0, right), svg.scale(values, bottom, 0)
    out = [
        svg.text(-LEFT, 14 - TOP, plot["title"], "start", ' font-weight="600" font-size="13"'),
        svg.epochs(axes["steps"]["per_epoch"], end, bottom, x),
        svg.grid(right, bottom, steps, values),
    ]
    for line in plot["lines"]:
        points = lines[line["name"]]
        if line["name"] == "mean":
            # An outlier counts as much as the edge, or 1e31 would never be forgotten.
            means = [(step, min(max(m, values.low), values.high), num) for step, m, num in points]
            points = smoothed(means, HALF_LIFE * (steps.high - steps.low))
        out.append(svg.polyline(points, x, y, _stroke(line, line["color"])))
        # Few points get dots, as a line of one point is nothing to see.
        if 0 < len(points) <= line["dots"]:
            out.append(f'<g color="{line["color"]}">{svg.markers(points, x, y)}</g>')
    if best := axes["best"].get(plot["name"]):
        at_x, at_y, label = x(best["step"]), y(best["value"]), best["label"]
        # Within the area, so that it never meets the labels of axes and epochs.
        fits = at_x + 10 + svg.CHAR_WIDTH * len(label) < right
        left, anchor = (at_x + 8, "start") if fits else (at_x - 8, "end")
        top = at_y + (20 if at_y < 24 else -12)
        out += [svg.ring(at_x, at_y), svg.text(left, top, label, anchor)]
    return "".join(out)


def _legend(entries: list[Style], top: int, width: int) -> tuple[str, int]:
    """The signs of the lines with their labels, and where they end."""
    out, left = [], 0.0
    for one in entries:
        # An estimate: SVG cannot measure text, and no browser is asked.
        wide = 56 + 6.6 * len(one["label"])
        if left and left + wide > width:
            left, top = 0.0, top + LEGEND
        size = 24 / len(one["colors"])
        signs = [
            f'<path d="M{n * size:g} 0h{size:g}" {_stroke(one, color)}/>'
            for n, color in enumerate(one["colors"])
        ]
        if one["dots"] > FEW:  # not of a few points alone
            signs.append('<circle cx="12" r="3"/>')
        sign = svg.ring(12, 0, 5.5) if one["ring"] else "".join(signs)
        label = svg.text(30, 4, one["label"], "start", ' font-size="12"')
        out.append(f'<g transform="translate({left:.0f},{top + 14})">{sign}{label}</g>')
        left += wide
    return "".join(out), top + LEGEND * bool(entries)


def _stroke(line: Style, color: str) -> str:
    drawn = f'stroke="{color}" stroke-width="{line["width"]}" stroke-opacity="{line["alpha"]}"'
    dash = " ".join(map(str, line["dash"]))
    return f'{drawn} stroke-dasharray="{dash}"' if dash else drawn
