"""Lines of the ranks as they come: for terminals, logs, and what trainings print. Client."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from gpupool.core.formatting import format_ranks
from gpupool.core.terminal import DrawnLine, has_cursor, shows_colours, write_line
from gpupool.core.wire.output import STREAMS, OutputKind
from gpupool.notebook.cells.lines import Lines
from gpupool.notebook.cells.picture import Look
from gpupool.notebook.cells.shown import mark_shown
from gpupool.notebook.monitor.loop_views import LoopViews
from gpupool.notebook.page import ansi
from gpupool.pool.notices import NoticeLines
from gpupool.spmd.cell import CellReport, States


class LineView:
    """Lines as they come, with their ranks; one that several say at about the same time once."""

    def __init__(
        self, ranks: Sequence[int], look: Look, stop_wish: threading.Event | None = None
    ) -> None:
        self._shown = {OutputKind.DISPLAY, *[OutputKind.RESULT] * look.show_values}
        self._lines = Lines(ranks)
        self._loops = LoopViews(stop_wish=stop_wish)
        self._lock = threading.Lock()  # output comes in another thread than that which waits
        self._is_over = False
        self._now = time.monotonic()  # of the last tick: what comes between two is in order of rank
        self._bar = DrawnLine(sys.stdout)
        self.notice = NoticeLines()

    def on_output(self, rank: int, kind: OutputKind, content: Any) -> None:
        """Keep the lines; they are written by the waiting thread, whose cell it is."""
        if kind is OutputKind.EVENTS:
            self._loops.take(content)
            return
        with self._lock:
            if kind in STREAMS:
                self._lines.feed(rank, content, self._now)
            elif kind in self._shown:
                self._lines.end(rank, self._now, str(content["data"].get("text/plain", "")))
        if self._is_over:  # nobody waits any more
            self._write(is_over=True)

    def tick(self, states: States = dict) -> None:
        """Write what has come."""
        self._write(is_over=False)
        self._loops.tick()

    def finish(self, report: CellReport) -> None:
        """Write the rest, also lines without an end."""
        with self._lock:
            for rank in report.outputs:
                self._lines.end(rank, self._now)
        self._write(is_over=True)
        self._loops.finish()
        mark_shown(report.result, values=OutputKind.RESULT in self._shown)

    def _write(self, *, is_over: bool) -> None:
        with self._lock:
            self._is_over, self._now = is_over, time.monotonic()
            lines = self._lines.due(self._now, at_end=is_over)
            bars = self._lines.bars() if has_cursor(sys.stdout) and not is_over else []
        seen = str if shows_colours(sys.stdout) else ansi.plain
        if lines:
            labelled = (f"[{format_ranks(ranks)}] {seen(line)}" for ranks, line in lines)
            write_line("\n".join(labelled), sys.stdout)
        # the first unfinished line, most likely a bar, as it is now
        self._bar.draw(bars[0] if bars else "")


class QuietView(LineView):
    """Shows nothing but notices: who wants no output wants to hear of a cell that hangs."""

    def __init__(self) -> None:
        super().__init__((), Look())

    def on_output(self, rank: int, kind: OutputKind, content: Any) -> None:
        """Nothing."""

    def finish(self, report: CellReport) -> None:
        """Nothing; the result counts as seen."""
        mark_shown(report.result)
