"""What the ranks of a %%spmd cell say: which view shows it, and those for terminals. Client."""

from __future__ import annotations

import os
import shutil
import sys
import time
import tokenize
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.getipython import get_ipython
from IPython.display import display

from gpupool.notebook.front_end import in_notebook
from gpupool.notebook.notices import UnwaitedView
from gpupool.notebook.shown import Part, mark_shown, part_shown
from gpupool.notebook.spmd_figures import is_rich
from gpupool.notebook.spmd_lines import Lines, Merger, fold_bars
from gpupool.notebook.spmd_live import LiveView, named
from gpupool.notebook.spmd_picture import Look, result_html, result_text, values_text
from gpupool.notebook.widgets import Bars, SendComm, settle_bars
from gpupool.pool.notices import NoticeLines
from gpupool.pool.result import SpmdResult
from gpupool.spmd.cell import CellReport, View
from gpupool.spmd.output import format_ranks

MAX_QUEUED_LINES = 200_000  # that nobody has waited for yet


def make_view(
    name: str,
    ranks: Sequence[int],
    send_comm: SendComm,
    show_values: bool = True,
    *,
    inline: bool = False,
    is_value: bool = False,
    result_name: str = "",
    unwaited: str = "",
) -> View:
    """The view for `--view`: in a notebook a live tail and groups at the end, else lines.

    Args:
        send_comm: sends a widget's message to a rank.
        show_values: whether the value of the last expression belongs to the output.
        inline: the pool is inline: what the cell prints and displays is seen already.
        is_value: the result is a value that the user's code may use or let IPython show, so the
            view shows what the ranks print, and not the values.
        result_name: how the user can ask for the result: "_", or a name.
        unwaited: names the cell, if nobody waits for it at first.
    """
    if unwaited:
        view = make_view(
            name,
            ranks,
            send_comm,
            show_values,
            inline=inline,
            is_value=is_value,
            result_name=result_name,
        )
        return UnwaitedView(view, unwaited)
    draws = in_notebook()
    part: Part = "texts" if is_value else "everything"
    if name == "quiet":
        return QuietView("everything")
    if inline:
        return ValueView() if show_values and not is_value else QuietView(part)
    shows = show_values and not is_value
    if name == "raw" or not draws:
        figure = show_figure if draws else None
        return LineView(ranks, shows, figure, fold_equal=name == "auto", part=part)
    return LiveView(Look(name == "auto", shows, name=result_name), send_comm, part)


def ends_quietly(cell: str) -> bool:
    """Whether a cell ends in a semicolon: its value is not to be shown."""
    try:
        return bool(DisplayHook.semicolon_at_end_of_expression(cell))
    except (SyntaxError, tokenize.TokenError):  # a magic's line, or the ranks will say what it is
        return False


def show_figure(ranks: Sequence[int], bundle: Mapping[str, Any]) -> None:
    """Display what ranks have displayed, their names above it."""
    display(named(tuple(ranks)), raw=True)
    display(bundle["data"], metadata=bundle.get("metadata", {}), raw=True)


class QuietView:
    """Shows nothing; `part` is what counts as seen.

    Except notices: the wish for no output is none for a cell that hangs without a word.
    """

    def __init__(self, part: Part) -> None:
        self._part: Part = part
        self.notice = NoticeLines()

    def on_output(self, rank: int, kind: str, content: Any) -> None:
        """Nothing."""

    def tick(self) -> None:
        """Nothing."""

    def finish(self, report: CellReport) -> None:
        """Nothing."""
        mark_shown(report.result, self._part)


class ValueView:
    """Shows the value of a cell that an inline pool has run; the rest has been seen already."""

    def __init__(self) -> None:
        self.notice = NoticeLines()

    def on_output(self, rank: int, kind: str, content: Any) -> None:
        """Nothing: it is on the screen."""

    def tick(self) -> None:
        """Nothing."""

    def finish(self, report: CellReport) -> None:
        """Show the value as the notebook shows one."""
        for output in report.outputs.values():
            for bundle in output.displays:
                if bundle["kind"] == "result":
                    display(bundle["data"], metadata=bundle.get("metadata", {}), raw=True)
        mark_shown(report.result)


class LineView:
    """Lines as they come, with their ranks: for terminals, logs and `--view raw`.

    Args:
        show_figure: draws figures; without it their text is shown.
        fold_equal: a line that several ranks say at about the same time is shown once.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        show_values: bool = True,
        show_figure: Callable[[Sequence[int], Mapping[str, Any]], None] | None = None,
        *,
        fold_equal: bool = False,
        part: Part = "everything",
    ) -> None:
        self._part: Part = part
        self._show_values = show_values
        self._show_figure = show_figure
        self._lines = Lines()
        self._bars = Bars()
        self._queue: deque[tuple[int, str | dict[str, Any]]] = deque(maxlen=MAX_QUEUED_LINES)
        self._merger = Merger(ranks) if fold_equal else None
        self._report: CellReport | None = None
        self._has_bar = False
        self._notices: deque[str | None] = deque()
        self._write_notice = NoticeLines()

    def notice(self, text: str | None) -> None:
        """Queue it: it is written below the lines before it, and not into a bar."""
        self._notices.append(text)

    def on_output(self, rank: int, kind: str, content: Any) -> None:
        """Queue the complete lines; they are written by the waiting thread, whose cell it is."""
        if kind == "comm":
            self._bars.note(content)
        elif kind in ("stdout", "stderr"):
            self._queue.extend((rank, line) for line in self._lines.feed(rank, content))
            if self._report is not None:  # nobody waits any more
                self._write_late(rank)
        elif kind == "display" or (kind == "result" and self._shows(content)):
            self._queue.extend((rank, line) for line in self._lines.rest(rank))
            if self._draws(content):
                self._queue.append((rank, content))
            elif self._bars.text(content) is None:  # else it comes when it is complete
                text = str(content["data"].get("text/plain", ""))
                self._queue.extend((rank, line) for line in text.split("\n"))

    def tick(self) -> None:
        """Write what has come."""
        self._write(at_end=False)

    def finish(self, report: CellReport) -> None:
        """Write the rest, also lines without an end."""
        for rank, output in report.outputs.items():
            self._queue.extend((rank, line) for line in self._lines.rest(rank))
            texts = [self._bars.text(bundle) for bundle in output.displays]
            self._queue.extend((rank, text) for text in texts if text)
            settle_bars(output, self._bars)
        self._write(at_end=True)
        self._report = report
        mark_shown(report.result, self._part)

    def _shows(self, content: Mapping[str, Any]) -> bool:
        return self._show_values or self._draws(content)

    def _draws(self, content: Mapping[str, Any]) -> bool:
        return self._show_figure is not None and is_rich(content)

    def _write(self, *, at_end: bool) -> None:
        now = time.monotonic()
        self._wipe_bar()
        while self._queue:
            rank, piece = self._queue.popleft()
            if not isinstance(piece, str):
                self._write_merged(now, at_end=True)
                sys.stdout.flush()
                assert self._show_figure is not None
                self._show_figure((rank,), piece)
            elif self._merger is not None:
                self._merger.add(rank, piece, now)
            else:
                sys.stdout.write(f"[{rank}] {piece}\n")
        self._write_merged(now, at_end=at_end)
        while self._notices and not at_end:
            sys.stdout.flush()
            self._write_notice(self._notices.popleft())
        if not at_end and _has_cursor():
            self._draw_bar()
        sys.stdout.flush()

    def _draw_bar(self) -> None:
        """Show the first unfinished line, a progress bar most likely, as it is now."""
        bars = fold_bars(self._lines.partial())
        if bars:
            sys.stdout.write(bars[0][: shutil.get_terminal_size().columns - 1])
            self._has_bar = True

    def _wipe_bar(self) -> None:
        if self._has_bar:
            sys.stdout.write("\r\x1b[K")
            self._has_bar = False

    def _write_merged(self, now: float, *, at_end: bool) -> None:
        for ranks, line in self._merger.due(now, at_end=at_end) if self._merger else ():
            sys.stdout.write(f"[{format_ranks(ranks)}] {line}\n")

    def _write_late(self, rank: int) -> None:
        while self._queue:
            rank, piece = self._queue.popleft()
            sys.stdout.write(f"[{rank}, late] {piece}\n")
        sys.stdout.flush()


def _has_cursor() -> bool:
    """Whether a line can be drawn over."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


# ---- results that are displayed --------------------------------------------------------------


def keep_quietly(result: SpmdResult) -> SpmdResult | None:
    """Have `_` and `Out` hold a result that is not to be shown again; gives the cell's value.

    A terminal writes "Out[3]:" before every value, also before one that shows nothing.
    """
    shell: Any = get_ipython()
    if getattr(shell, "kernel", None) is not None:
        return result  # the formatter below sees to it
    shell.displayhook.update_user_ns(result)
    return None


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
