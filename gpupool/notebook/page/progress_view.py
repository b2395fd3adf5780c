"""How far something is, where the user is: a bar in a notebook, a line on a terminal. Client."""

from __future__ import annotations

import sys
from html import escape

from tqdm import tqdm

from gpupool.core.progress import BYTES, Drawing, Progress
from gpupool.core.terminal import DrawnLine, has_cursor, width
from gpupool.notebook.page import markup
from gpupool.notebook.page.front_end import Place, in_notebook

CLASS = "gpupool-progress"  # of its element, which sets it apart from what a cell shows


def open_drawing() -> Drawing | None:
    """What draws something here; None where nothing is to move, as in a log."""
    if in_notebook():
        return NotebookBar()
    if not has_cursor(sys.stderr):
        return None
    line = DrawnLine(sys.stderr)
    return lambda one: line.draw(bar_text(one, width()))


class NotebookBar:
    """A bar below the cell, or in a place where something else is to be at its end."""

    def __init__(self, place: Place | None = None) -> None:
        self._place = place or Place()
        self._place.bind()
        self._drawn: dict[str, str] = {}

    def __call__(self, one: Progress) -> None:
        """Draw it, if it looks other than before: each drawing is a message."""
        bundle = {"text/html": bar_html(one), "text/plain": bar_text(one)}
        if bundle != self._drawn:
            self._drawn = bundle
            self._place.show(bundle)


def bar_text(one: Progress, width: int | None = None) -> str:
    """ "Listing: 12000 files [00:03, 4000.00 files/s]", in `width` characters; "" at its end."""
    if one.is_over:
        return ""
    # A store may report its files all at once: then there is only the time to show.
    is_counted = bool(one.total or (one.unit and one.done))
    line: str = tqdm.format_meter(
        one.done,
        one.total,
        one.elapsed_s,
        ncols=width,
        prefix=f"{one.what} ({one.note})" if one.note else one.what,
        ascii=True,  # any terminal has these
        unit=BYTES if one.unit == BYTES else f" {one.unit}".rstrip(),
        unit_scale=one.unit == BYTES,
        bar_format=None if is_counted else "{desc} [{elapsed}]",
    )
    return line


def bar_html(one: Progress) -> str:
    """The same as HTML; at its end nothing is seen of it."""
    style = "" if one.is_over else f' style="{markup.CODE};white-space:pre-wrap"'
    return f'<div class="{CLASS}"{style}>{escape(bar_text(one))}</div>'
