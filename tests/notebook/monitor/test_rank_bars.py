"""Bars of what the first rank of a cell tells of."""

from __future__ import annotations

import threading

from gpupool.core import progress
from gpupool.core.progress import Course
from gpupool.core.wire.events import ProgressEvent
from gpupool.notebook.monitor.rank_bars import RankBars


def test_what_ranks_tell_of_is_drawn_until_the_cell_ends() -> None:
    before = progress._opening[0]
    seen: list[Course] = []
    drawn = {"Listing": threading.Event(), "Reading": threading.Event(), "Late": threading.Event()}

    def draw(course: Course) -> None:
        seen.append(course)
        drawn[course.what].set()

    bars = RankBars()
    progress.draw_with(lambda course: draw)
    try:
        bars.take([ProgressEvent("Listing", 5, 0, "files"), ProgressEvent("Reading", 5, 9)])
        assert drawn["Listing"].wait(30)
        assert drawn["Reading"].wait(30)
        bars.take([ProgressEvent("Reading", 9, 9), ProgressEvent("Listing", 7, 0, "files")])
        bars.close()
        bars.take([ProgressEvent("Late", 1, 0)])  # of a thread that goes on
    finally:
        progress.draw_with(before)
    ends = [(c.what, c.done, c.total, c.unit) for c in seen if c.is_over]
    assert ends == [("Reading", 9, 9, "samples"), ("Listing", 7, None, "files")]
    assert not drawn["Late"].is_set()
    assert seen[0].elapsed_s >= 1  # on the rank it has lasted for a second
