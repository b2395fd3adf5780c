"""What the ranks of a %%spmd cell say: which view shows it, and results. Client."""

from __future__ import annotations

import threading
import tokenize
from collections.abc import Sequence
from typing import Any

from IPython.core.displayhook import DisplayHook

from gpupool.core.wire.output import OutputKind
from gpupool.notebook.cells.line_view import LineView
from gpupool.notebook.cells.live import LiveView
from gpupool.notebook.cells.picture import Look, result_html, result_text
from gpupool.notebook.cells.shown import part_shown
from gpupool.notebook.page.front_end import in_notebook
from gpupool.pool.result import SpmdResult
from gpupool.spmd.cell import View


def make_view(name: str, ranks: Sequence[int], look: Look, stop_wish: threading.Event) -> View:
    """The view for `--view`: in a notebook a live tail and groups at the end, else lines.

    `stop_wish` is what a press of a loop's Stop button sets.
    """
    if name == "quiet":
        return QuietView(ranks, look)
    if in_notebook():
        return LiveView(ranks, look, stop_wish)
    return LineView(ranks, look, stop_wish)


def ends_quietly(cell: str) -> bool:
    """Whether a cell ends in a semicolon: its value is not to be shown."""
    try:
        return bool(DisplayHook.semicolon_at_end_of_expression(cell))
    except (SyntaxError, tokenize.TokenError):  # a magic's line, or the ranks will say what it is
        return False


class QuietView(LineView):
    """Shows nothing but notices: who wants no output wants to hear of a cell that hangs."""

    def on_output(self, rank: int, kind: OutputKind, content: Any) -> None:
        """Nothing."""


def register_formatters(shell: Any) -> None:
    """Let IPython show a result by what its ranks said, unless its cell has just done so."""

    def show_once(result: SpmdResult) -> None:
        if part_shown(result) != "everything" or getattr(shell, "kernel", None) is None:
            raise NotImplementedError  # to IPython: it is to be shown like other objects

    def text(result: SpmdResult, p: Any, cycle: bool) -> None:
        is_inside = len(p.stack) > 1  # of a list, say
        texts = part_shown(result) == "nothing"
        p.text(repr(result) if is_inside else result_text(result, texts=texts))

    def html(result: SpmdResult) -> str:
        return result_html(result, texts=part_shown(result) == "nothing")

    formatters = shell.display_formatter.formatters
    formatters["text/plain"].for_type(SpmdResult, text)
    formatters["text/html"].for_type(SpmdResult, html)
    shell.display_formatter.ipython_display_formatter.for_type(SpmdResult, show_once)
