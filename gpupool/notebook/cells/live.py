"""A %%spmd cell in a notebook: a bounded tail while it runs, then groups. Runs on the client."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gpupool.core.formatting import format_ranks
from gpupool.core.wire.output import STREAMS, OutputKind
from gpupool.notebook.cells.figures import Bundle, bundle_html, is_embeddable, is_rich
from gpupool.notebook.cells.lines import Lines
from gpupool.notebook.cells.picture import (
    Look,
    heading,
    report_html,
    report_text,
    shown_time,
    states_html,
)
from gpupool.notebook.cells.shown import mark_error_shown, mark_shown
from gpupool.notebook.monitor.loop_views import LoopViews
from gpupool.notebook.page import ansi, markup
from gpupool.notebook.page.front_end import Place
from gpupool.notebook.pool.pool_bar import interrupt_button
from gpupool.pool.calls.diagnosis import Diagnosis
from gpupool.spmd.cell import CellReport, States
from gpupool.spmd.output import fold_displays

REDRAW_EVERY_S = 0.25
CLOCK_AFTER_S = 2.0  # a cell that says nothing shows its clock from then on
NUM_TAIL_LINES = 20
MAX_LINE_CHARS = 400  # of the live tail
MAX_CHARS_PER_S = 250_000  # drawn while it runs, figures included


class LiveView:
    """A bounded tail that is drawn again while the cell runs, then the ranks' output in groups.

    What ranks say after the end (threads, workers) is added to the groups, under the same cell.
    """

    def __init__(self, ranks: Sequence[int], look: Look, stop_wish: threading.Event) -> None:
        self._look = look
        self._place = Place()
        self._loops = LoopViews(beside=self._place, stop_wish=stop_wish)
        # Three times what is shown: equal lines of several ranks become one.
        self._lines = Lines(ranks, MAX_LINE_CHARS, 3 * NUM_TAIL_LINES)
        self._figure: tuple[int, Bundle] | None = None  # the newest, of the lowest rank
        # Three threads meet here: of the output, of the cell that waits, and of the timer.
        self._lock = threading.RLock()
        self._began = self._drawn_at = time.monotonic()
        self._drawn_chars = 0
        self._dirty = False
        self._notice: str | None = None
        self._report: CellReport | None = None
        self._timer: threading.Timer | None = None

    def on_output(self, rank: int, kind: OutputKind, content: Any) -> None:
        """Keep the end of the text; drawing is left to `tick`, so that floods cost nothing."""
        if kind is OutputKind.EVENTS:
            self._loops.take(content)
            return
        with self._lock:
            self._dirty = True
            if self._report is None:
                self._note(rank, kind, content)
            elif self._timer is None:  # nobody calls `tick` any more
                wait_s = max(2 * REDRAW_EVERY_S, self._drawn_chars / MAX_CHARS_PER_S)
                self._timer = threading.Timer(wait_s, self._draw_late)
                self._timer.daemon = True  # else a kernel that ends would wait for it
                self._timer.start()

    def notice(self, text: str | None) -> None:
        """Have it stand below the tail, also where nothing was printed; the end takes it away."""
        with self._lock:
            self._notice, self._dirty = text, True

    def tick(self, states: States = dict) -> None:
        """Draw, if there is news and it is time."""
        self._loops.tick()
        now = time.monotonic()
        # The larger the picture, the rarer: the page and its websocket have to keep up.
        wait_s = max(REDRAW_EVERY_S, self._drawn_chars / MAX_CHARS_PER_S)
        is_news = self._dirty or (now - self._began > CLOCK_AFTER_S and now - self._drawn_at > 1)
        if not is_news or now - self._drawn_at < wait_s:
            return
        with self._lock:
            self._dirty = False
            bundle = self._running(now, states())
        self._drawn_at = now
        # Outside of the lock, so that output is never held up by a slow front end.
        self._show(bundle)

    def finish(self, report: CellReport) -> None:
        """Put the groups in the place of the tail."""
        # Even if nothing is shown now: late text must appear under this cell, not the next one.
        self._place.bind()
        self._loops.finish()
        with self._lock:
            self._report = report
            self._figure = None
        # A tail that is there must be replaced, also by an empty report.
        self._show_report(always=self._place.is_shown)
        if report.error is not None:
            mark_error_shown(report.error)
        self._show_others(report)
        mark_shown(report.result, values=self._look.show_values)

    # ---- inside --------------------------------------------------------------------------

    def _note(self, rank: int, kind: OutputKind, content: Any) -> None:
        """Add a piece of output to the live picture."""
        shown_rank, figure = self._figure or (rank, {})
        if kind in STREAMS:
            self._lines.feed(rank, content, time.monotonic())
        elif kind is OutputKind.CLEAR and not content.get("wait"):
            self._lines.clear(rank)
            self._figure = None if shown_rank == rank else self._figure
        elif kind is OutputKind.DISPLAY and not is_rich(content):
            self._lines.end(rank, time.monotonic(), str(content["data"].get("text/plain", "")))
        elif kind in (OutputKind.DISPLAY, OutputKind.UPDATE) and is_embeddable(content):
            is_it = figure.get("transient") == content.get("transient") and rank == shown_rank
            if is_it or (kind is OutputKind.DISPLAY and rank <= shown_rank):
                self._figure = rank, content

    def _running(self, now: float, states: Mapping[int, str]) -> dict[str, str]:
        tail = self._lines.tail(NUM_TAIL_LINES)
        lines = [f"[{format_ranks(ranks)}] {line}" for ranks, line in tail]
        lines += self._lines.bars()
        blocks = [states_html(states) + markup.muted(f"running, {shown_time(now - self._began)}")]
        if lines:
            blocks.append(markup.code_html("\n".join(map(ansi.to_html, lines))))
        if self._figure is not None:
            rank, figure = self._figure
            blocks.append(markup.bar(f"<b>[{rank}]</b> {bundle_html(figure)}", markup.GREY))
        plain = "\n".join(map(ansi.plain, lines)) or "running"
        if self._notice is not None:
            blocks.append(notice_html(self._notice))
            plain += f"\ngpupool: {self._notice}"
        return {"text/html": markup.card(*blocks), "text/plain": plain}

    def _show_report(self, *, always: bool) -> None:
        assert self._report is not None
        text = report_text(self._report, self._look)
        if text or always:
            html = report_html(self._report, self._look)
            self._show({"text/html": html, "text/plain": text or heading(self._report)})

    def _show(self, data: dict[str, str]) -> None:
        self._drawn_chars = sum(map(len, data.values()))
        self._place.show(data)

    def _show_others(self, report: CellReport) -> None:
        """Show what cannot stand in our HTML, each in a place of its own, below its ranks."""
        others = {
            rank: [
                bundle
                for bundle in output.displays
                if is_rich(bundle) and not is_embeddable(bundle)
                if self._look.show_values or bundle["kind"] == OutputKind.DISPLAY
            ]
            for rank, output in report.outputs.items()
        }
        for ranks, bundle in fold_displays(others):
            Place(self._place).show({"text/plain": f"[{format_ranks(ranks)}]"})
            Place(self._place).show(bundle["data"], dict(bundle.get("metadata") or {}))

    def _draw_late(self) -> None:
        """Draw what came after the end: soon, and not too often."""
        with self._lock:
            self._timer = None
            self._show_report(always=True)


def notice_html(text: str) -> str:
    """A notice as an amber bar; one about ranks as a table of them, with an Interrupt button."""
    if not isinstance(text, Diagnosis) or not text.places:
        return markup.bar(markup.code(text), markup.AMBER)
    rows = [
        (f"{format_ranks(ranks)}{f' ({host})' * bool(host)}", doing or "running", line)
        for ranks, doing, line, host in text.places
    ]
    table = markup.table(("ranks", "where", "line"), rows)
    parts = [f"<b>{escape(text.head)}</b>", table, escape(text.advice), interrupt_button()]
    return markup.bar("".join(f"<div>{part}</div>" for part in parts if part), markup.AMBER)
