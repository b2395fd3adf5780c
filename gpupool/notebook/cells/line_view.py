"""Lines of the ranks as they come: for terminals, logs, and what trainings print. Client."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from gpupool.core.formatting import format_ranks
from gpupool.core.terminal import DrawnLine, cleared, has_cursor, shows_colours
from gpupool.core.wire.output import STREAMS, OutputKind
from gpupool.notebook.cells.lines import Lines, Merger, fold_bars
from gpupool.notebook.cells.shown import Part, mark_shown
from gpupool.notebook.monitor.loop_views import LoopViews
from gpupool.notebook.page import ansi
from gpupool.pool.notices import NoticeLines
from gpupool.spmd.cell import CellReport, States

MAX_QUEUED_LINES = 200_000  # that nobody has waited for yet


class LineView:
    """Lines as they come, with their ranks; one that several say at about the same time once."""

    def __init__(
        self,
        ranks: Sequence[int],
        show_values: bool = True,
        *,
        part: Part = "everything",
        stop_wish: threading.Event | None = None,
    ) -> None:
        self._part: Part = part
        self._show_values = show_values
        self._lines = Lines()
        self._loops = LoopViews(stop_wish=stop_wish)
        # A deque needs no lock: a background thread appends, the waiting thread takes.
        self._queue: deque[tuple[int, str]] = deque(maxlen=MAX_QUEUED_LINES)
        self._merger = Merger(ranks)
        self._report: CellReport | None = None
        self._bar = DrawnLine(sys.stdout)
        self._notices: deque[str | None] = deque()
        self._write_notice = NoticeLines()

    def notice(self, text: str | None) -> None:
        """Queue it: it is written below the lines before it, and not into a bar."""
        self._notices.append(text)

    def on_output(self, rank: int, kind: OutputKind, content: Any) -> None:
        """Queue the complete lines; they are written by the waiting thread, whose cell it is."""
        if kind is OutputKind.EVENTS:
            self._loops.take(content)
        elif kind in STREAMS:
            self._queue.extend((rank, line) for line in self._lines.feed(rank, content))
        elif kind in (OutputKind.DISPLAY, OutputKind.RESULT):
            self._add_display(rank, kind, content)
        if self._report is not None:  # nobody waits any more
            self._write_late()

    def tick(self, states: States = dict) -> None:
        """Write what has come."""
        self._write(at_end=False)
        self._loops.tick()

    def finish(self, report: CellReport) -> None:
        """Write the rest, also lines without an end."""
        for rank in report.outputs:
            self._queue.extend((rank, line) for line in self._lines.rest(rank))
        self._write(at_end=True)
        self._loops.finish()
        self._report = report
        mark_shown(report.result, self._part)

    def _add_display(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        if kind == OutputKind.RESULT and not self._show_values:
            return
        self._queue.extend((rank, line) for line in self._lines.rest(rank))
        text = str(content["data"].get("text/plain", ""))
        self._queue.extend((rank, line) for line in text.split("\n"))

    def _write(self, *, at_end: bool) -> None:
        now = time.monotonic()
        while self._queue:
            self._merger.add(*self._queue.popleft(), now)
        # A notice comes below what was said before it.
        for ranks, line in self._merger.due(now, at_end=at_end or bool(self._notices)):
            _write_line(f"[{format_ranks(ranks)}] {line}")
        while self._notices and not at_end:
            sys.stdout.flush()
            self._write_notice(self._notices.popleft())
        # the first unfinished line, a progress bar most likely, as it is now
        bars = [] if at_end or not has_cursor(sys.stdout) else fold_bars(self._lines.partial())
        if bars:
            self._bar.draw(bars[0])
        else:
            self._bar.close()
        sys.stdout.flush()

    def _write_late(self) -> None:
        while self._queue:
            rank, line = self._queue.popleft()
            _write_line(f"[{rank}, late] {line}")
        sys.stdout.flush()


def _write_line(line: str) -> None:
    """Write a line of a rank; its colours only where they can be seen."""
    with cleared(sys.stdout) as stream:
        print(line if shows_colours(sys.stdout) else ansi.plain(line), file=stream)
