"""What the ranks of a cell say, on a terminal: groups of ranks if it is over soon, else lines.

%%spmd  8 ranks  ok  240 ms (slowest: 5)
[0-4, 6, 7] device NVIDIA H200
            rows 6250
[5]         device NVIDIA H200
            rows 6244  <- differs

How the cell went is said where the ranks say different things and where it took a second; an error
says it itself.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence

from gpupool.core.terminal import cleared, shows_colours
from gpupool.notebook.cells.heading import terminal_heading
from gpupool.notebook.cells.line_view import LineView
from gpupool.notebook.cells.picture import Look, said_text
from gpupool.notebook.cells.shown import Part, mark_shown
from gpupool.notebook.page import ansi
from gpupool.spmd.cell import CellReport, States

SOON_S = 0.5  # lines wait so long for the others
LONG_S = 1.0


class TerminalView(LineView):
    """Holds back what is said in the first half second; with a notice it all comes at once.

    Args:
        result_name: how the user can ask for the result: "_", or a name.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        show_values: bool = True,
        *,
        result_name: str = "",
        part: Part = "everything",
        stop_wish: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(ranks, show_values, fold_equal=True, part=part, stop_wish=stop_wish)
        self._look = Look(show_values=show_values, name=result_name)
        self._clock = clock
        self._began = clock()
        self._comes_live = False

    def tick(self, states: States = dict) -> None:
        """Write what has come, once it lasts."""
        # For good: what was written as lines cannot become groups again.
        self._comes_live |= bool(self._notices) or self._clock() - self._began >= SOON_S
        if self._comes_live:
            super().tick()
        else:
            self._loops.tick()

    def finish(self, report: CellReport) -> None:
        """Write the groups of ranks, or the rest of the lines, and how the cell went."""
        if self._comes_live:
            super().finish(report)
            if report.error is None and report.elapsed_s >= LONG_S:
                _write(terminal_heading(report))
            return
        # The report has all text, so the queued lines would be seen twice.
        self._queue.clear()
        said = said_text(report, self._look)
        has_groups = "\n[" in said  # all other lines are indented
        if has_groups and report.error is None:
            said = f"{terminal_heading(report)}\n{said}"
        if said:
            _write(said)
        self._loops.finish()
        self._report = report
        mark_shown(report.result, self._part)


def _write(text: str) -> None:
    with cleared(sys.stdout) as stream:
        print(text if shows_colours(sys.stdout) else ansi.plain(text), file=stream, flush=True)
