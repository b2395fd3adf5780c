"""The plots of a monitor: how their lines look, and all of them as one SVG. Pure; on the client.

A plot is {"name", "title", "unit" ("%" or ""), "lines"}, which static/plots.js draws too. A line
has the name of its points, a label, a colour, a width, an opacity, dashes, and dots, if it has no
more than so many points. The points of "mean" are drawn `smoothed`.

The rules of the axes are those of static/plots.js, which draws the plots that answer, and has
logarithmic ones too. The area of a plot begins at (0, 0); labels stand around it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, NamedTuple
from urllib.parse import quote

Points = Sequence[tuple[float, float]]
Scale = Callable[[float], float]
Style = dict[str, Any]

SEVERAL = 100  # dots of more validations would hide the other lines
FEW = 40  # of so few points a line would hardly be seen, of one not at all
HALF_LIFE = 0.02  # of the drawn steps: the width of smoothing unless chosen
WIDTH, NARROW, HEIGHT, LEGEND = 660, 420, 252, 26  # of the only plot; of several, in two columns
LEFT, RIGHT, TOP, BOTTOM, GAP = 46, 24, 38, 38, 18  # around the area of a plot; between two
# mid-tones, as the page may be white or nearly black; their dashes differ too
_COLORS = ("#1a85d6", "#e0632a", "#2da44e", "#a855c7", "#b58900", "#12939a")
_DASHES: tuple[list[int], ...] = ([], [7, 3], [2, 3], [9, 3, 2, 3], [4, 4], [1, 4])
CHAR_WIDTH = 6.2  # pixels of 11, about
INK = (
    "#777777"  # of words in a picture, which cannot know whether the page is white or nearly black
)
_MISREAD = re.compile(r"[^\w.~\- '/:;,=()!+]+", re.ASCII)  # by an attribute, a URL or an XML parser


class Axis(NamedTuple):
    low: float
    high: float
    ticks: Sequence[float] = ()


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
    return picture("".join([*drawn, legend]), width, height, label)


def _plot(plot: Style, lines: dict[str, list[Any]], axes: dict[str, Any], right: int) -> str:
    bottom, end = HEIGHT - TOP - BOTTOM, axes["steps"]["high"]
    steps = step_axis(axes["steps"]["low"], end)
    values = value_axis(point[1] for points in lines.values() for point in points)
    x, y = scale(steps, 0, right), scale(values, bottom, 0)
    out = [
        text(-LEFT, 14 - TOP, plot["title"], "start", ' font-weight="600" font-size="13"'),
        epochs(axes["steps"]["per_epoch"], end, bottom, x),
        grid(right, bottom, steps, values, axes["steps"].get("label", "Step")),
    ]
    for line in plot["lines"]:
        points = lines[line["name"]]
        if line["name"] == "mean":
            # An outlier counts as much as the edge, or 1e31 would never be forgotten.
            means = [(step, min(max(m, values.low), values.high), num) for step, m, num in points]
            points = smoothed(means, HALF_LIFE * (steps.high - steps.low))
        out.append(polyline(points, x, y, _stroke(line, line["color"])))
        # Few points get dots, as a line of one point is nothing to see.
        if 0 < len(points) <= line["dots"]:
            out.append(f'<g color="{line["color"]}">{markers(points, x, y)}</g>')
    if best := axes["best"].get(plot["name"]):
        at_x, at_y, label = x(best["step"]), y(best["value"]), best["label"]
        # Within the area, so that it never meets the labels of axes and epochs.
        fits = at_x + 10 + CHAR_WIDTH * len(label) < right
        left, anchor = (at_x + 8, "start") if fits else (at_x - 8, "end")
        top = at_y + (20 if at_y < 24 else -12)
        out += [ring(at_x, at_y), text(left, top, label, anchor)]
    return "".join(out)


def _legend(entries: list[Style], top: int, width: int) -> tuple[str, int]:
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
        sign = ring(12, 0, 5.5) if one["ring"] else "".join(signs)
        label = text(30, 4, one["label"], "start", ' font-size="12"')
        out.append(f'<g transform="translate({left:.0f},{top + 14})">{sign}{label}</g>')
        left += wide
    return "".join(out), top + LEGEND * bool(entries)


def _stroke(line: Style, color: str) -> str:
    drawn = f'stroke="{color}" stroke-width="{line["width"]}" stroke-opacity="{line["alpha"]}"'
    dash = " ".join(map(str, line["dash"]))
    return f'{drawn} stroke-dasharray="{dash}"' if dash else drawn


# ---- axes, and what is drawn on them ------------------------------------------------------------


def value_axis(values: Iterable[float]) -> Axis:
    """The axis of these: from 0, unless that hides a curve. A few that are far off lie beyond."""
    ordered = sorted(values)
    if not ordered:
        return nice_axis(0.0, 1.0)
    near = _near(ordered)
    low, high = near[0], near[-1]
    hides = 0 < high - low < high / 2  # a curve in the upper half is flat
    return nice_axis(low if hides else min(0.0, low), high)


def _near(ordered: list[float]) -> list[float]:
    """Sorted values without up to three at each end that are far from all others."""
    for _ in ("the highest", "the lowest"):
        few = min(3, len(ordered) // 20)
        gaps = [(n, ordered[-n] - ordered[-n - 1], ordered[-n - 1]) for n in range(1, few + 1)]
        far = [n for n, gap, last in gaps if gap > 3 * (last - ordered[0])]
        ordered = [-value for value in reversed(ordered[: len(ordered) - max(far, default=0)])]
    return ordered


def nice_step(span: float, count: int) -> float:
    """The smallest 1, 2, 2.5 or 5 times a power of ten that divides `span` in at most `count`."""
    power: float = 10.0 ** math.floor(math.log10(span / count))
    return next(m * power for m in (1, 2, 2.5, 5, 10, 20) if span <= count * m * power * (1 + 1e-9))


def nice_axis(low: float, high: float) -> Axis:
    """An axis that begins and ends on a tick and holds both values."""
    if high <= low:
        high = low + (abs(low) / 5 or 1.0)
    step = nice_step(high - low, 5)
    # The small terms: 0.3 / 0.1 is 2.999..., which would add a tick that nobody needs.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Through text: 3 * 0.1 is 0.30000000000000004, and would stand so beside the plot.
    ticks = [float(f"{n * step:.12g}") for n in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], ticks)


def step_axis(low: int, high: int) -> Axis:
    """The axis of these steps; there are no half ones."""
    size = math.ceil(nice_step(high - low, 6))
    return Axis(low, high, range(math.ceil(low / size) * size, high + 1, size))


def fitted_end(now: int, plan: int, *, is_over: bool) -> int:
    """Where the axis of steps ends: a quarter ahead while there will be more, else at the last.

    A round number, which stays where it is for many steps; never beyond the plan (0: none).

    >>> fitted_end(100, 5000, is_over=False), fitted_end(111, 5000, is_over=True)
    (125, 111)
    """
    if is_over:
        return max(now, 1)
    end = math.ceil(nice_axis(0, max(1.25 * now, 10)).high)
    return min(end, plan) if plan >= max(now, 1) else end


def scale(axis: Axis, start: float, end: float) -> Scale:
    """From a value on the axis to a pixel between `start` and `end`; what is beyond is there."""
    low, high, _ = axis
    pixels = (end - start) / (high - low)
    return lambda value: start + pixels * (min(max(value, low), high) - low)


def tick_label(tick: float) -> str:
    """A number that fits beside a plot.

    >>> tick_label(0.0025), tick_label(5000), tick_label(2.5e6), tick_label(-2e-05)
    ('0.0025', '5,000', '2.5e6', '-2e-5')
    """
    if 1000 <= abs(tick) < 100_000:
        return f"{tick:,.0f}"
    return f"{tick:g}".replace("e-0", "e-").replace("e+0", "e")


def text(x: float, y: float, words: str, anchor: str = "middle", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def grid(right: float, bottom: float, steps: Axis, values: Axis, label: str) -> str:
    x, y = scale(steps, 0, right), scale(values, bottom, 0)
    lines = "".join(f"M0 {y(tick):.1f}H{right}" for tick in values.ticks)
    out = [f'<path d="{lines}" stroke="currentColor" stroke-opacity=".25"/>']
    out += [text(-6, y(tick) + 4, tick_label(tick), "end") for tick in values.ticks]
    out += [text(x(tick), bottom + 15, f"{tick:,}") for tick in steps.ticks]
    return "".join([*out, text(right / 2, bottom + 30, label)])


def epochs(per_epoch: int, end: int, bottom: float, x: Scale) -> str:
    """Bands of one or more epochs, every second shaded, labelled above, where no curve goes."""
    count = math.ceil(end / per_epoch) if per_epoch else 0  # of a stream nobody knows
    size = math.ceil(nice_step(count, 12)) if count else 1
    out = []
    for n, first in enumerate(range(0, count, size)):
        left, right = x(first * per_epoch), x((first + size) * per_epoch)
        if n % 2 == 0:
            box = f'x="{left:.1f}" width="{right - left:.1f}" height="{bottom}"'
            out.append(f'<rect {box} fill-opacity=".1"/>')
        label = f"{first + 1}" if n else "Epoch 1"
        # A label wider than its band would run into the next one.
        if CHAR_WIDTH * len(label) < right - left:
            out.append(text((left + right) / 2, -5, label))
    return "".join(out)


def polyline(points: Points, x: Scale, y: Scale, style: str) -> str:
    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    return f'<polyline fill="none" {style} points="{path}"/>'


def markers(points: Points, x: Scale, y: Scale) -> str:
    """A dot on each point; smaller where they are many, which must not become one thick line."""
    size = 6 if len(points) <= 40 else 3
    # Lines of no length with round caps: one element draws all dots.
    dots = "".join(f"M{x(step):.1f},{y(value):.1f}h0" for step, value in points)
    return f'<path stroke="currentColor" stroke-width="{size}" stroke-linecap="round" d="{dots}"/>'


def ring(x: float, y: float, radius: float = 6.5) -> str:
    """The mark of the best validation."""
    style = 'fill="none" stroke="currentColor" stroke-width="1.5"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" {style}/>'


def picture(inner: str, width: float, height: float, label: str) -> str:
    """An SVG as an image: it stays where SVG itself is taken out, on GitHub and without trust."""
    drawn = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="system-ui,sans-serif" '
        f'font-size="11" fill="{INK}" color="{INK}">{inner}</svg>'
    )
    # Percent signs for what would be misread: a third less than base64. Our own elements have
    # double quotes only; those in words are escaped by then.
    file = _MISREAD.sub(lambda match: quote(match[0]), drawn.replace('"', "'"))
    return (
        f'<img class="gpupool-plots" src="data:image/svg+xml,{file}" alt="{escape(label)}" '
        f'width="{width:g}" style="display:block;width:100%;height:auto;max-width:100%"/>'
    )
