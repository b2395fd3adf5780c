"""Notices of a cell that nobody may be waiting for. Runs on the client."""

from __future__ import annotations

import threading
from html import escape
from typing import Any

from gpupool.core.formatting import format_ranks
from gpupool.core.wire.output import OutputKind
from gpupool.notebook.page import markup
from gpupool.notebook.page.cell_output import Place
from gpupool.notebook.page.front_end import in_notebook
from gpupool.notebook.pool.pool_bar import interrupt_button
from gpupool.pool.notices import Notice, NoticeLines
from gpupool.spmd.cell import CellReport, States, View


class UnwaitedView:
    """The view of a `--nowait` cell: what `view` is, once somebody waits for the cell.

    Until then its notices stand under the cell that has started it, which is the one that runs
    when this is made; on a terminal they are lines that name it.
    """

    def __init__(self, view: View, name: str) -> None:
        self._view = view
        self._lines = NoticeLines(name)
        self._place = Place() if in_notebook() else None
        if self._place is not None:
            # Now: when a notice comes, another cell may be running.
            self._place.bind()
        self._lock = threading.Lock()
        self._text: str | None = None
        self._is_waited_for = False

    def on_output(self, rank: int, kind: OutputKind, content: Any) -> None:
        """Pass it on."""
        self._view.on_output(rank, kind, content)

    def notice(self, text: str | None) -> None:
        """Show it under the cell, or where the cell is waited for."""
        with self._lock:
            self._text = text
            if self._is_waited_for:
                self._view.notice(text)
            elif self._place is None:
                self._lines(text)
            else:
                self._put(text)

    def tick(self, states: States = dict) -> None:
        """Somebody waits."""
        self._hand_over()
        self._view.tick(states)

    def finish(self, report: CellReport) -> None:
        """The end."""
        self._hand_over()
        self._view.finish(report)

    def _hand_over(self) -> None:
        with self._lock:
            if self._is_waited_for:
                return
            self._is_waited_for = True
            self._put(None)
            if self._text is not None and self._place is not None:  # a line has been read
                self._view.notice(self._text)

    def _put(self, text: str | None) -> None:
        if self._place is not None and (text is not None or self._place.is_shown):
            html = markup.card(notice_html(text)) if text is not None else ""
            plain = notice_text(text) if text is not None else ""
            self._place.show({"text/html": html, "text/plain": plain})


def notice_html(text: str) -> str:
    """A notice as an amber bar; one about ranks as a table of them, with an Interrupt button."""
    if not isinstance(text, Notice) or not text.places:
        return markup.bar(markup.code(text), markup.AMBER)
    rows = [(format_ranks(ranks), doing or "running", line) for ranks, doing, line in text.places]
    table = markup.table(("ranks", "where", "line"), rows)
    parts = [f"<b>{escape(text.head)}</b>", table, escape(text.advice), interrupt_button()]
    return markup.bar("".join(f"<div>{part}</div>" for part in parts if part), markup.AMBER)


def notice_text(text: str) -> str:
    """A notice as lines."""
    return f"gpupool: {text}"
