"""A %%spmd cell in a notebook: a bounded tail while it runs, then groups. Runs on the client."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from html import escape
from typing import Any

from gpupool.core.formatting import format_ranks
from gpupool.core.wire.output import STREAMS, OutputKind
from gpupool.notebook.cells.figures import bundle_html, is_embeddable, is_rich
from gpupool.notebook.cells.heading import shown_time, states_html
from gpupool.notebook.cells.lines import Lines, fold_bars, merge
from gpupool.notebook.cells.notices import notice_html, notice_text
from gpupool.notebook.cells.picture import (
    Look,
    has_something,
    report_html,
    report_text,
)
from gpupool.notebook.cells.shown import Part, mark_error_shown, mark_shown
from gpupool.notebook.monitor.loop_views import LoopViews
from gpupool.notebook.page import ansi, markup
from gpupool.notebook.page.cell_output import Place
from gpupool.spmd.cell import CellReport, States
from gpupool.spmd.output import fold_displays

REDRAW_EVERY_S = 0.25
MAX_ROWS = 64  # of bars of ranks, which scroll
CLOCK_AFTER_S = 2.0  # a cell that says nothing shows its clock from then on
NUM_TAIL_LINES = 20
MAX_LINE_CHARS = 400  # of the live tail
MAX_CHARS_PER_S = 250_000  # drawn while it runs, figures included
MAX_LIVE_FIGURES = 8


class LiveView:
    """A bounded tail that is drawn again while the cell runs, then the ranks' output in groups.

    What ranks say after the end (threads, workers) is added to the groups, under the same cell.
    """

    def __init__(
        self,
        look: Look,
        part: Part = "everything",
        stop_wish: threading.Event | None = None,
    ) -> None:
        self._look = look
        self._part: Part = part
        self._place = Place()
        self._loops = LoopViews(beside=self._place, stop_wish=stop_wish)
        # Three times what is shown: equal lines of several ranks become one.
        self._lines = Lines(MAX_LINE_CHARS, 3 * NUM_TAIL_LINES)
        self._tails: dict[int, deque[tuple[float, str]]] = {}
        self._figures: dict[int, list[dict[str, Any]]] = {}
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
            if self._report is None:
                self._note(rank, kind, content)
            self._dirty = True
            if self._report is not None and self._timer is None:
                self._draw_later()

    def notice(self, text: str | None) -> None:
        """Have it stand below the tail, also where nothing was printed; the end takes it away."""
        with self._lock:
            if self._report is None:
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
            self._tails.clear()
            self._figures.clear()
            self._dirty = False
        # A tail that is there must be replaced, also by an empty report.
        if has_something(report, self._look) or self._place.is_shown:
            self._show_report()
        if report.error is not None:
            mark_error_shown(report.error)
        self._show_others(report)
        mark_shown(report.result, self._part)

    # ---- inside --------------------------------------------------------------------------

    def _note(self, rank: int, kind: OutputKind, content: Any) -> None:
        """Add a piece of output to the live picture."""
        if kind in STREAMS:
            self._add_lines(rank, self._lines.feed(rank, content))
        elif kind is OutputKind.CLEAR and not content.get("wait"):
            self._tails.pop(rank, None)
            self._lines.clear(rank)
            self._figures.pop(rank, None)
        elif kind in (OutputKind.DISPLAY, OutputKind.UPDATE) and is_embeddable(content):
            display_id = (content.get("transient") or {}).get("display_id")
            mine = self._figures.setdefault(rank, [])
            for n, figure in enumerate(mine):
                if kind is OutputKind.UPDATE and figure["id"] == display_id:
                    mine[n] = {**content, "id": display_id}
            if kind is OutputKind.DISPLAY:
                mine.append({**content, "id": display_id})
                del mine[:-MAX_LIVE_FIGURES]
        elif kind is OutputKind.DISPLAY and not is_rich(content):
            text = str(content["data"].get("text/plain", ""))
            self._add_lines(rank, self._lines.rest(rank))
            self._add_lines(rank, [line[:MAX_LINE_CHARS] for line in text.split("\n")])

    def _add_lines(self, rank: int, lines: list[str]) -> None:
        now = time.monotonic()
        tail = self._tails.setdefault(rank, deque(maxlen=3 * NUM_TAIL_LINES))
        tail.extend((now, line) for line in lines)

    def _running(self, now: float, states: Mapping[int, str]) -> dict[str, str]:
        tail = merge(self._tails)[-NUM_TAIL_LINES:]
        lines = [f"[{format_ranks(ranks)}] {line}" for ranks, line in tail]
        lines += fold_bars(self._lines.partial())[:MAX_ROWS]
        head = states_html(states) + markup.muted(f"running, {shown_time(now - self._began)}")
        figures = {rank: list(mine) for rank, mine in self._figures.items()}
        blocks = [
            markup.bar(f"<b>[{format_ranks(ranks)}]</b> {bundle_html(bundle)}", markup.GREY)
            for ranks, bundle in fold_displays(figures)[-MAX_LIVE_FIGURES:]
        ]
        text = markup.code_html("\n".join(map(ansi.to_html, lines))) if lines else ""
        plain = "\n".join(map(ansi.plain, lines)) or "running"
        if self._notice is not None:
            blocks.append(notice_html(self._notice))
            plain += f"\n{notice_text(self._notice)}"
        return {"text/html": markup.card(head, text, *blocks), "text/plain": plain}

    def _show_report(self) -> None:
        assert self._report is not None
        look, report = self._look, self._report
        data = {"text/html": report_html(report, look), "text/plain": report_text(report, look)}
        self._show(data)

    def _show(self, data: dict[str, str]) -> None:
        self._drawn_chars = sum(map(len, data.values()))
        self._place.show(data)

    def _show_others(self, report: CellReport) -> None:
        """Show what cannot stand in our HTML."""
        others = {
            rank: [
                bundle
                for bundle in output.displays
                if is_rich(bundle)
                and not is_embeddable(bundle)
                and (self._look.show_values or bundle["kind"] == OutputKind.DISPLAY)
            ]
            for rank, output in report.outputs.items()
        }
        # Each in a place of its own: a mime bundle cannot hold two of one type.
        for ranks, bundle in fold_displays(others):
            Place(self._place).show(named(ranks))
            Place(self._place).show(bundle["data"], dict(bundle.get("metadata") or {}))

    def _draw_later(self) -> None:
        """Draw what came after the end, soon and not too often; with the lock held."""
        wait_s = max(2 * REDRAW_EVERY_S, self._drawn_chars / MAX_CHARS_PER_S)
        self._timer = threading.Timer(wait_s, self._draw_late)
        # Else a kernel that ends would wait for it.
        self._timer.daemon = True
        self._timer.start()

    def _draw_late(self) -> None:
        with self._lock:
            self._timer, self._dirty = None, False
            if self._report is not None:
                self._show_report()


def named(ranks: tuple[int, ...]) -> dict[str, str]:
    """The names of ranks, to stand above what they have displayed."""
    name = f"[{format_ranks(ranks)}]"
    html = f'<div style="{markup.FONT}"><b>{escape(name)}</b></div>'
    return {"text/html": html, "text/plain": name}
