"""Plots as SVG: strings from data that is ready to draw. Pure functions; they run on the client.

Colours are mid-tones, as the page they will stand on is not known: white, or nearly black.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any
from urllib.parse import quote

from gpupool.notebook.drawing.axes import Points, tick_label

INK = "#666666"  # of words in a picture that cannot take the page's colour
FONT_SIZE = 11
CHAR_WIDTH = 6.2  # of that size, about
DIGIT_WIDTH = 7  # in wide fonts
MARGIN = 18  # right of an area
# A picture does not know the theme of the page; its colours are turned over where that is dark.
DARK_PAGES = ('body[data-jp-theme-light="false"]', "body.vscode-dark", 'html[theme="dark"]')
DARK_STYLE = (
    "<style>"
    + ",".join(f"{page} .gpupool-plots" for page in DARK_PAGES)
    + "{filter:invert(1) hue-rotate(180deg)}</style>"
)

Scale = Callable[[float], float]

_PLAIN = " '/:;,=()!+"  # neither an attribute nor a URL misreads them


@dataclass(frozen=True)
class Area:
    """Where curves are drawn, in pixels; labels stand around it."""

    left: float
    right: float
    top: float
    bottom: float


def scale(axis: dict[str, Any], start: float, end: float) -> Scale:
    """From a value on the axis to a pixel between `start` and `end`; what is beyond is there."""
    low, high = axis["low"], axis["high"]
    by = math.log10 if axis.get("log") else float
    first, size = by(low), by(high) - by(low)
    return lambda value: start + (end - start) * (by(min(max(value, low), high)) - first) / size


def text(x: float, y: float, words: str, anchor: str = "middle", style: str = "") -> str:
    """A line of words."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def ticks(
    area: Area,
    x_axis: dict[str, Any],
    y_axis: dict[str, Any],
    x: Scale,
    y: Scale,
    name: str = "Step",
) -> str:
    """Lines of the grid with their numbers, and the name of the axis below."""
    grid = "".join(f"M{area.left} {y(tick):.1f}H{area.right}" for tick, _ in y_axis["ticks"])
    out = [f'<path d="{grid}" stroke="currentColor" stroke-opacity=".25"/>']
    out += [text(area.left - 6, y(tick) + 4, label, "end") for tick, label in y_axis["ticks"]]
    end = area.right + MARGIN  # the last number is moved to the left where it would be cut
    out += [
        text(min(x(tick), end - DIGIT_WIDTH * len(label) / 2), area.bottom + 15, label)
        for tick, label in x_axis["ticks"]
    ]
    out.append(text((area.left + area.right) / 2, area.bottom + 30, name))
    return "".join(out)


def bands(area: Area, spans: list[tuple[int, int, str]], x: Scale) -> str:
    """Every second span of steps shaded; the labels stand above, where no curve goes."""
    out = []
    for index, (first, last, label) in enumerate(spans):
        left, width = x(first), x(last) - x(first)
        if index % 2 == 0:
            size = f'width="{width:.1f}" height="{area.bottom - area.top:.1f}"'
            out.append(f'<rect x="{left:.1f}" y="{area.top}" {size} fill-opacity=".1"/>')
        # A label wider than its band would run into the next one.
        if CHAR_WIDTH * len(label) < width:
            out.append(text(left + width / 2, area.top - 5, label))
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


def clipped(area: Area, axis: dict[str, Any], x: Scale) -> str:
    """A triangle at the edge for each outlier, and the value of the farthest in words."""
    out, outliers = [], axis.get("clipped", [])
    for step, value in outliers:
        # Its tip is at the edge that the value lies beyond.
        tip, way = (area.top, 1) if value > axis["high"] else (area.bottom, -1)
        out.append(f'<path d="M{x(step):.1f},{tip + way:g}l4,{7 * way}h-8z"/>')
    if above := [(value, step) for step, value in outliers if value > axis["high"]]:
        value, step = max(above)
        label = tick_label(float(f"{value:.3g}"))
        fits = x(step) + 8 + CHAR_WIDTH * len(label) < area.right
        left, anchor = (x(step) + 7, "start") if fits else (x(step) - 7, "end")
        out.append(text(left, area.top + 10, label, anchor))
    return "".join(out)


def ring(x: float, y: float, radius: float = 6.5) -> str:
    """The mark of the best validation."""
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="none" stroke="currentColor" '
        'stroke-width="1.5"/>'
    )


def best(area: Area, point: dict[str, Any] | None, x: Scale, y: Scale) -> str:
    """The ring of the best validation with its label, where the curve does not go: below or above.

    The label stays within the area, so that it never meets those of the axes and epochs.
    """
    if point is None:
        return ""
    at_x, at_y, label = x(point["step"]), y(point["value"]), point["label"]
    fits = at_x + 10 + CHAR_WIDTH * len(label) < area.right
    below = at_y + 24 < area.bottom if point["below"] else at_y - 24 < area.top
    left, anchor = (at_x + 8, "start") if fits else (at_x - 8, "end")
    return ring(at_x, at_y) + text(left, at_y + (20 if below else -12), label, anchor)


def drawing(inner: str, width: float, height: float, label: str = "") -> str:
    """An SVG that takes the colour of the page; without a `label` only decoration."""
    attributes = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    size = "display:block;width:100%;height:auto" if label else "vertical-align:middle"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" {attributes} font-size="{FONT_SIZE}" '
        f'fill="currentColor" style="{size}">{inner}</svg>'
    )


def picture(inner: str, width: float, height: float, label: str) -> str:
    """The same as a picture, which passes where SVG itself is taken out of a page.

    GitHub does so, and JupyterLab with notebooks that are not trusted. The page needs `DARK_STYLE`.
    """
    return (
        f'<img class="gpupool-plots" src="{data_url(inner, width, height)}" alt="{escape(label)}" '
        f'width="{width:g}" style="display:block;width:100%;height:auto;max-width:100%"/>'
    )


def data_url(inner: str, width: float, height: float) -> str:
    """An SVG file in an address."""
    file = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="system-ui,sans-serif" '
        f'font-size="{FONT_SIZE}" fill="{INK}" color="{INK}">{inner}</svg>'
    )
    # Percent signs for what an attribute, a URL or an XML parser would misread: a third less than
    # base64. Our own elements have double quotes only; those in words are escaped by then.
    file = file.replace('"', "'")
    return f"data:image/svg+xml,{quote(file, safe=_PLAIN)}"
