"""What the ranks of a %%spmd cell say: which view shows it, and those for terminals. Client."""

from __future__ import annotations

import threading
import tokenize
from collections.abc import Sequence
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.getipython import get_ipython

from gpupool.core.wire.output import OutputKind
from gpupool.notebook.cells.line_view import LineView
from gpupool.notebook.cells.live import LiveView
from gpupool.notebook.cells.picture import Look, result_html, result_text, values_text
from gpupool.notebook.cells.shown import Part, mark_shown, part_shown
from gpupool.notebook.page.front_end import in_notebook
from gpupool.pool.notices import NoticeLines
from gpupool.pool.result import SpmdResult
from gpupool.spmd.cell import CellReport, States, View


def make_view(
    name: str,
    ranks: Sequence[int],
    show_values: bool = True,
    *,
    is_value: bool = False,
    result_name: str = "",
    stop_wish: threading.Event | None = None,
) -> View:
    """The view for `--view`: in a notebook a live tail and groups at the end, else lines.

    Args:
        show_values: whether the value of the last expression belongs to the output.
        is_value: the result is a value that the user's code may use or let IPython show, so the
            view shows what the ranks print, and not the values.
        result_name: how the user can ask for the result: "_", or a name.
        stop_wish: what a press of a loop's Stop button sets.
    """
    part: Part = "texts" if is_value else "everything"
    if name == "quiet":
        return QuietView("everything")
    shows = show_values and not is_value
    if not in_notebook():
        return LineView(ranks, shows, part=part, stop_wish=stop_wish)
    return LiveView(Look(show_values=shows, name=result_name), part, stop_wish)


def ends_quietly(cell: str) -> bool:
    """Whether a cell ends in a semicolon: its value is not to be shown."""
    try:
        return bool(DisplayHook.semicolon_at_end_of_expression(cell))
    except (SyntaxError, tokenize.TokenError):  # a magic's line, or the ranks will say what it is
        return False


class QuietView:
    """Shows nothing; `part` is what counts as seen.

    Except notices: the wish for no output is none for a cell that hangs without a word.
    """

    def __init__(self, part: Part) -> None:
        self._part: Part = part
        self.notice = NoticeLines()

    def on_output(self, rank: int, kind: OutputKind, content: Any) -> None:
        """Nothing."""

    def tick(self, states: States = dict) -> None:
        """Nothing."""

    def finish(self, report: CellReport) -> None:
        """Nothing."""
        mark_shown(report.result, self._part)


# ---- results that are displayed --------------------------------------------------------------


def keep_quietly(result: SpmdResult) -> None:
    """Have `_` and `Out` hold a result that is not to be shown again.

    As the cell's value it would have IPython flush both streams once more (1 to 2 ms) to show
    nothing, and a terminal write "Out[3]:".
    """
    shell: Any = get_ipython()
    shell.displayhook.update_user_ns(result)


def register_formatters(shell: Any) -> None:
    """Let IPython show a result by what its ranks said, unless its cell has just done so."""

    def show_once(result: SpmdResult) -> None:
        if part_shown(result) != "everything" or getattr(shell, "kernel", None) is None:
            raise NotImplementedError  # to IPython: it is to be shown like other objects

    def text(result: SpmdResult, p: Any, cycle: bool) -> None:
        if len(p.stack) > 1:  # inside of a list, say
            p.text(repr(result))
        else:
            seen = part_shown(result) != "nothing"
            p.text(values_text(result) if seen else result_text(result))

    def html(result: SpmdResult) -> str:
        return result_html(result, texts=part_shown(result) == "nothing")

    formatters = shell.display_formatter.formatters
    formatters["text/plain"].for_type(SpmdResult, text)
    formatters["text/html"].for_type(SpmdResult, html)
    shell.display_formatter.ipython_display_formatter.for_type(SpmdResult, show_once)
