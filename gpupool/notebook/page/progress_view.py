"""How far something is, where the user is: a bar in a notebook, a line on a terminal. Client.

On what is neither, a log file say, nothing is drawn. Where a program executes a notebook, its log
gets a line for each stage.
"""

from __future__ import annotations

import sys
from html import escape
from typing import TextIO

from tqdm import tqdm

from gpupool.core.progress import BYTES, Course, Drawing
from gpupool.core.terminal import DrawnLine, has_cursor, width
from gpupool.notebook.page import markup
from gpupool.notebook.page.front_end import in_notebook, log_line

CLASS = "gpupool-progress"  # of its element, which sets it apart from what a cell shows


def open_drawing(course: Course) -> Drawing | None:
    """What draws `course` here; None where nothing is to move."""
    if in_notebook():
        return NotebookBar()
    return TerminalLine(sys.stderr) if has_cursor(sys.stderr) else None


class NotebookBar:
    """A bar below the cell; at the end nothing is seen of it."""

    def __init__(self) -> None:
        from gpupool.notebook.page.cell_output import Place  # with IPython: see front_end.py

        self._place = Place()
        self._place.bind()
        self._drawn: dict[str, str] = {}
        self._line = ""

    def __call__(self, course: Course) -> None:
        """Draw it, if it looks other than before."""
        bundle = {"text/html": bar_html(course), "text/plain": bar_text(course)}
        # Each drawing is a message to the front end.
        if bundle != self._drawn:
            self._drawn = bundle
            self._place.show(bundle)
        line = _what(course)
        if line != self._line:  # numbers alone are no news for a log
            self._line = line
            log_line(line)


class TerminalLine:
    """A line that is drawn over itself, and wiped at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._line = DrawnLine(stream)

    def __call__(self, course: Course) -> None:
        """Draw it."""
        if course.is_over:
            self._line.close()
        else:
            self._line.draw(bar_text(course, width()))


def bar_text(course: Course, width: int | None = None) -> str:
    """The course in one line, as tqdm writes it, of `width` characters.

    For example "Listing: 12,000 files [00:03, 4.00k files/s]"; at its end "".
    """
    if course.is_over:
        return ""
    what = _what(course)
    if not _has_numbers(course):
        return f"{what} [{tqdm.format_interval(course.elapsed_s)}]"
    bar = "{l_bar}{bar}| " if course.total else "{desc}: "
    return _meter(course, bar + _numbers(course), what, width)


def bar_html(course: Course) -> str:
    """The course as HTML: a bar and its numbers; at its end nothing that is seen."""
    if course.is_over:
        return f'<div class="{CLASS}"></div>'
    what = _what(course)
    bar = ""
    if course.total:  # else it would only move, and start again with every drawing
        share = min(1.0, course.done / course.total)
        style = "width:16em;max-width:40%;vertical-align:middle;accent-color:#0072bd"
        bar = (
            f'<progress value="{share:.3f}" max="1" aria-label="{escape(what)}" style="{style}">'
            "</progress>"
        )
        numbers = _meter(course, "{percentage:.0f} % · " + _numbers(course), "")
    elif _has_numbers(course):
        numbers = _meter(course, _numbers(course), "")
    else:
        numbers = f"[{tqdm.format_interval(course.elapsed_s)}]"
    return (
        f'<div class="{CLASS}" style="{markup.FONT};font-variant-numeric:tabular-nums">'
        f"{escape(what)} {bar} {escape(numbers)}</div>"
    )


def _what(course: Course) -> str:
    return f"{course.what} ({course.note})" if course.note else course.what


def _has_numbers(course: Course) -> bool:
    """Whether there is more to show than the time: a store may report its files all at once."""
    return course.total is not None or bool(course.unit and course.done)


def _numbers(course: Course) -> str:
    """tqdm's format of what stands right of the bar."""
    left = "<{remaining}" if course.total else ""
    # tqdm formats the result once more.
    count = _count(course, course.total).replace("{", "{{").replace("}", "}}")
    return f"{count} [{{elapsed}}{left}, {{rate_fmt}}]"


def _count(course: Course, total: int | None) -> str:
    """ "1,200 of 5,000 files" or "1.2 of ..." of bytes."""
    if course.unit == BYTES:
        done, of = (tqdm.format_sizeof(n, "B") for n in (course.done, total or 0))
    else:
        done, of = f"{course.done:,}", f"{total or 0:,}"
    unit = "" if course.unit in ("", BYTES) else f" {course.unit}"
    return f"{done} of {of}{unit}" if total is not None else f"{done}{unit}"


def _meter(course: Course, bar_format: str, what: str, width: int | None = None) -> str:
    unit = BYTES if course.unit == BYTES else f" {course.unit}".rstrip()
    line: str = tqdm.format_meter(
        course.done,
        course.total,
        course.elapsed_s,
        ncols=width,
        prefix=what,
        ascii=True,  # any terminal has these
        unit=unit,
        unit_scale=True,
        bar_format=bar_format,
    )
    return line.rstrip()
