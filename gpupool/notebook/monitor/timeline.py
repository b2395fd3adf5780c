"""The strip per rank under the curves: heat rows along the steps. Pure; runs on the client.

`timeline_view` has all that is drawn, by `static/timeline.js` on a canvas and by `timeline_svg`.
A strip is one quantity, a row of it one rank, a cell the mean over a bucket of steps. A cell is a
letter of `LEVELS`, as lists of so many numbers would cost more to send than all the curves.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from typing import Any

from gpupool.core.formatting import milliseconds
from gpupool.notebook.drawing import svg
from gpupool.training.history import TrainingHistory
from gpupool.training.timeline import Timeline

View = dict[str, Any]

LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUV"
NOTHING = " "
FEW_RANKS = 5  # of so few all strips stand below each other; of more one at a time
MAX_GAPS = 100  # validations that are marked
# A hue for what is bad where it is much, one for what is good. The shade alone says how much, so
# eyes that know few colours read it, on light and dark pages.
COLORS = {"own": (224, 99, 42), "wait": (168, 85, 199), "utilization": (26, 133, 214)}
TITLES = {
    "own": "Own time per step",
    "wait": "Waiting for other ranks",
    "utilization": "Utilization",
}
HEAD = 20  # pixels of a strip's title


def timeline_view(history: TrainingHistory) -> View:
    """What the strips show; {} where no rank has reported anything."""
    timeline, start = history.timeline, history.start
    if start is None or not timeline.num_buckets:
        return {}
    ranks = start.ranks or tuple(sorted(history.ranks))
    strips = [_strip(timeline, name, ranks) for name in Timeline.NAMES]
    if len(ranks) == 1:
        strips = [strip for strip in strips if strip and strip["name"] != "wait"]
    steps = [event.step for event in history.validations]
    return {
        "width": timeline.width,
        "count": timeline.num_buckets,
        "ranks": [str(rank) for rank in ranks],
        "row": row_height(len(ranks)),
        "strips": [strip for strip in strips if strip],
        "gaps": steps if len(steps) <= MAX_GAPS else [],
    }


def row_height(num_ranks: int) -> int:
    """Pixels of a row: 16 ranks are within 130 px with their title, 64 are still distinct.

    >>> row_height(4), row_height(16), row_height(64)
    (10, 6, 4)
    """
    return 10 if num_ranks <= FEW_RANKS else max(2, min(6, 256 // num_ranks))


def _strip(timeline: Timeline, name: str, ranks: tuple[int, ...]) -> View | None:
    rows = [timeline.means(rank, name) for rank in ranks]
    known = sorted(value for row in rows for value in row if value is not None)
    if not known:
        return None
    low, high = _range(known) if name == "own" else (0.0, 1.0)
    more = " or more" if known[-1] > high else ""
    ends = [milliseconds(low), milliseconds(high) + more] if name == "own" else ["0 %", "100 %"]
    return {
        "name": name,
        "title": TITLES[name],
        "unit": "s" if name == "own" else "%",
        "low": low,
        "high": high,
        "ends": ends,
        "color": list(COLORS[name]),
        "cells": [_letters(row, low, high) for row in rows],
    }


def _range(known: list[float]) -> tuple[float, float]:
    """From what is usual to what is slow: one stall, or noise alone, must not decide the shades."""
    low = known[len(known) // 20]  # sorted
    return low, max(1.5 * low, min(known[-1], 2 * known[len(known) // 2]), 1e-9)


def _letters(row: list[float | None], low: float, high: float) -> str:
    # All in one expression: it runs for hundreds of cells, twice a second.
    top, scale = len(LEVELS) - 1, (len(LEVELS) - 1) / (high - low)
    return "".join(
        [
            NOTHING
            if value is None
            else LEVELS[
                0 if value <= low else top if value >= high else round((value - low) * scale)
            ]
            for value in row
        ]
    )


# ---- as SVG -------------------------------------------------------------------------------------


def timeline_svg(view: View, axis: View, left: float, right: float, top: float) -> tuple[str, int]:
    """The strips from `top` on, on an axis of steps from `left` to `right`; and their height."""
    if not view or not view["strips"]:
        return "", 0
    shown = view["strips"] if len(view["ranks"]) <= FEW_RANKS else view["strips"][:1]
    height = view["row"] * len(view["ranks"])
    out = []
    for number, strip in enumerate(shown):
        y = top + number * (height + HEAD)
        words = f"{strip['title']} by rank, {' to '.join(strip['ends'])}"
        out.append(svg.text(left, y + 13, words, "start", ' font-weight="600"'))
        out.append(_rows(view, strip, axis, (left, right, y + HEAD)))
    return "".join(out), len(shown) * (height + HEAD) + 8


def _rows(view: View, strip: View, axis: View, place: tuple[float, float, float]) -> str:
    left, right, top = place
    x, row, num = svg.scale(axis, left, right), view["row"], len(view["ranks"])
    begin, end = x(0), x(view["width"] * view["count"])
    image = b64encode(_png(strip)).decode()
    # Clipped, as the last bucket may reach beyond the axis.
    box = f'x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{row * num}"'
    out = [
        f'<svg {box} viewBox="{left:.1f} {top} {right - left:.1f} {row * num}">'
        f'<image x="{begin:.1f}" y="{top}" width="{end - begin:.1f}" height="{row * num}" '
        'preserveAspectRatio="none" style="image-rendering:pixelated" '
        f'href="data:image/png;base64,{image}"/>'
    ]
    if view["gaps"]:  # one element: many validations would be most of the drawing
        cuts = "".join(f"M{x(step):.1f} {top}v{row * num}" for step in view["gaps"])
        out.append(f'<path d="{cuts}" stroke="#fff" stroke-width="1.5"/>')
    out.append("</svg>")
    every = -(-10 // row)  # labels need ten pixels each
    out += [
        svg.text(left - 6, top + row * (n + 0.5) + 3.5, name, "end", ' font-size="9"')
        for n, name in enumerate(view["ranks"])
        if n % every == 0
    ]
    return "".join(out)


def _png(strip: View) -> bytes:
    """A picture with a pixel for each cell; one of text or rectangles would be a hundred times it.

    Format: https://www.w3.org/TR/png-3/, with a palette whose entries differ in opacity alone.
    """
    rows = [bytes(LEVELS.find(cell) + 1 for cell in row) for row in strip["cells"]]
    palette = bytes(strip["color"]) * (len(LEVELS) + 1)
    opacity = bytes([0, *(round(255 * opacity_of(n)) for n in range(len(LEVELS)))])
    head = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    chunks = ((b"IHDR", head), (b"PLTE", palette), (b"tRNS", opacity), (b"IDAT", pixels))
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in (*chunks, (b"IEND", b""))
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def opacity_of(level: int) -> float:
    """How strong the colour of a level is: even the least is seen, so that a gap is one."""
    return 0.1 + 0.9 * level / (len(LEVELS) - 1)
