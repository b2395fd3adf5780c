"""What the running cell has shown of a result or an error: it is not shown again. Client."""

from __future__ import annotations

from typing import Any

from IPython.core.getipython import get_ipython

from gpupool.core.errors import SpmdError
from gpupool.notebook.cells.picture import result_html, result_text
from gpupool.pool.calls.output import SpmdResult


def mark_shown(result: SpmdResult | None, *, values: bool = True) -> None:
    """The running cell has shown this result, or of it only what the ranks have printed."""
    if result is not None:
        result.shown = (_this_cell(), "everything" if values else "texts")


def part_shown(result: SpmdResult) -> str:
    """What the cell that runs has shown of this result: "nothing", "texts" or "everything"."""
    cell, part = result.shown
    return part if cell == _this_cell() else "nothing"


def mark_error_shown(error: SpmdError) -> None:
    """The running cell has shown the tracebacks of this error: raised in it, it need not again."""
    shell: Any = get_ipython()

    # After the cell: asked for again in another one, the error shows its tracebacks once more.
    def forget(_: object) -> None:
        error.is_shown = False
        shell.events.unregister("post_run_cell", forget)

    error.is_shown = True
    shell.events.register("post_run_cell", forget)


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


def _this_cell() -> int:
    shell: Any = get_ipython()
    return int(shell.displayhook.prompt_count) if shell is not None else 0
