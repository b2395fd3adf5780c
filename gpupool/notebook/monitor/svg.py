"""A plot as SVG: axes with round ticks that fit what is drawn, and lines. Pure; on the client.

The rules of the axes are those of static/plots.js, which draws the plots that answer, and has
logarithmic ones too. The area of a plot begins at (0, 0); labels stand around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple
from urllib.parse import quote

Points = Sequence[tuple[float, float]]
Scale = Callable[[float], float]

CHAR_WIDTH = 6.2  # pixels of 11, about
# Of words in a picture, which cannot know whether the page is white or nearly black.
INK = "#777777"
_PLAIN = " '/:;,=()!+"  # neither an attribute nor a URL misreads them


class Axis(NamedTuple):
    """From where to where an axis goes, and what it has numbers at."""

    low: float
    high: float
    ticks: Sequence[float] = ()


def value_axis(values: Iterable[float]) -> Axis:
    """The axis of these: from 0, unless that hides a curve.

    A few that are far from all others lie beyond it.
    """
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
    """A line of words."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def grid(right: float, bottom: float, steps: Axis, values: Axis, label: str = "Step") -> str:
    """Lines of the grid, the numbers of both axes, and a label below."""
    x, y = scale(steps, 0, right), scale(values, bottom, 0)
    lines = "".join(f"M0 {y(tick):.1f}H{right}" for tick in values.ticks)
    out = [f'<path d="{lines}" stroke="currentColor" stroke-opacity=".25"/>']
    out += [text(-6, y(tick) + 4, tick_label(tick), "end") for tick in values.ticks]
    out += [text(x(tick), bottom + 15, f"{tick:,}") for tick in steps.ticks]
    return "".join([*out, text(right / 2, bottom + 30, label)])


def epochs(per_epoch: int, end: int, bottom: float, x: Scale) -> str:
    """Bands of one or more epochs, every second shaded, labelled above, where no curve goes.

    None where nobody knows how long an epoch is, as of a stream.
    """
    count = math.ceil(end / per_epoch) if per_epoch else 0
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
    """A line through points."""
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
    """An SVG as an image, which passes where SVG itself is taken out of a page.

    GitHub does so, and JupyterLab with notebooks that are not trusted.
    """
    drawn = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="system-ui,sans-serif" '
        f'font-size="11" fill="{INK}" color="{INK}">{inner}</svg>'
    )
    # Percent signs for what an attribute, a URL or an XML parser would misread: a third less than
    # base64. Our own elements have double quotes only; those in words are escaped by then.
    file = quote(drawn.replace('"', "'"), safe=_PLAIN)
    return (
        f'<img class="gpupool-plots" src="data:image/svg+xml,{file}" alt="{escape(label)}" '
        f'width="{width:g}" style="display:block;width:100%;height:auto;max-width:100%"/>'
    )
