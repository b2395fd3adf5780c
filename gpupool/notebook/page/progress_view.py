"""How far something is, where the user is: a bar in a notebook, a line on a terminal. Client.

On what is neither, a log file say, nothing is drawn. Where a program executes a notebook, its log
gets a line for each stage.
"""

from __future__ import annotations

import sys
from html import escape
from typing import TYPE_CHECKING

from tqdm import tqdm

from gpupool.core.progress import BYTES, Course, Drawing
from gpupool.core.terminal import DrawnLine, has_cursor, width
from gpupool.notebook.page import markup
from gpupool.notebook.page.front_end import in_notebook, log_line

if TYPE_CHECKING:
    from gpupool.notebook.page.cell_output import Place

CLASS = "gpupool-progress"  # of its element, which sets it apart from what a cell shows


def open_drawing(course: Course) -> Drawing | None:
    """What draws `course` here; None where nothing is to move."""
    if in_notebook():
        return NotebookBar()
    if not has_cursor(sys.stderr):
        return None
    line = DrawnLine(sys.stderr)
    return lambda one: line.close() if one.is_over else line.draw(bar_text(one, width()))


class NotebookBar:
    """A bar below the cell; at the end nothing is seen of it.

    Args:
        place: of what comes after it, and takes it at the end.
    """

    def __init__(self, place: Place | None = None) -> None:
        from gpupool.notebook.page.cell_output import Place  # with IPython: see front_end.py

        self._place, self._leaves = place or Place(), place is None
        self._place.bind()
        self._drawn: dict[str, str] = {}
        self._line = ""

    def __call__(self, course: Course) -> None:
        """Draw it, if it looks other than before: each drawing is a message."""
        if course.is_over and not self._leaves:
            return
        bundle = {"text/html": bar_html(course), "text/plain": bar_text(course)}
        if bundle != self._drawn:
            self._drawn = bundle
            self._place.show(bundle)
        if _what(course) != self._line:  # numbers alone are no news for a log
            self._line = _what(course)
            log_line(self._line)


def bar_text(course: Course, width: int | None = None) -> str:
    """The course in one line, as tqdm writes it, of `width` characters.

    For example "Listing: 12000 files [00:03, 4000.00 files/s]"; at its end "".
    """
    return "" if course.is_over else _meter(course, _what(course), width=width)


def bar_html(course: Course) -> str:
    """The course as HTML: a bar and its numbers; at its end nothing that is seen."""
    if course.is_over:
        return f'<div class="{CLASS}"></div>'
    what, bar, form = escape(_what(course)), "", None
    if course.total:  # else it would only move, and start again with every drawing
        form = "{percentage:.0f} % · {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"
        style = "width:16em;max-width:40%;vertical-align:middle;accent-color:#0072bd"
        share = min(1.0, course.done / course.total)
        bar = (
            f'<progress value="{share:.3f}" max="1" aria-label="{what}" style="{style}"></progress>'
        )
    numbers = escape(_meter(course, "", form))
    style = f"{markup.FONT};font-variant-numeric:tabular-nums"
    return f'<div class="{CLASS}" style="{style}">{what} {bar} {numbers}</div>'


def _what(course: Course) -> str:
    return f"{course.what} ({course.note})" if course.note else course.what


def _meter(course: Course, what: str, form: str | None = None, width: int | None = None) -> str:
    # A store may report its files all at once: then there is only the time to show.
    if course.total is None and not (course.unit and course.done):
        return f"{what} [{tqdm.format_interval(course.elapsed_s)}]".strip()
    line: str = tqdm.format_meter(
        course.done,
        course.total,
        course.elapsed_s,
        ncols=width,
        prefix=what,
        ascii=True,  # any terminal has these
        unit=BYTES if course.unit == BYTES else f" {course.unit}".rstrip(),
        unit_scale=course.unit == BYTES,
        bar_format=form,
    )
    return line.strip()
