"""Notices of a running cell or training, where there is no notebook to draw them in."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from gpupool.core.wire.output import OutputKind
from gpupool.notebook.cells.line_view import LineView
from gpupool.notebook.cells.views import make_view
from gpupool.notebook.monitor.picture import history_html, training_text
from gpupool.notebook.monitor.text import TextProgress
from gpupool.pool.notices import NoticeLines
from gpupool.spmd.cell import CellReport
from gpupool.training.history import TrainingHistory

REPORT = CellReport({}, 1.0)


def test_a_notice_is_a_line_below_what_was_said_before(capfd: pytest.CaptureFixture[str]) -> None:
    view = LineView((0, 1))
    view.on_output(0, OutputKind.STDOUT, "hello\n")
    view.notice("rank 1 hangs for 31 s.")
    assert capfd.readouterr().out == ""  # the waiting thread writes, whose cell it is
    view.tick()
    assert capfd.readouterr() == ("[0] hello\n", "gpupool: rank 1 hangs for 31 s.\n")


def test_what_comes_after_the_end_of_the_cell_is_shown_at_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    view = LineView((0, 1))
    view.finish(REPORT)
    view.on_output(0, OutputKind.STDOUT, "hello\n")
    view.on_output(1, OutputKind.DISPLAY, {"data": {"text/plain": "a table"}})
    assert capfd.readouterr().out == "[0, late] hello\n[1, late] a table\n"


def test_each_notice_is_told_once_until_it_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    tell = NoticeLines("cell In[3] (--nowait)")
    for text in ("it lasts 31 s", "it lasts 46 s", "another", None, "it lasts 1 min 2 s"):
        tell(text)
    assert capsys.readouterr().err.splitlines() == [
        "gpupool: cell In[3] (--nowait): it lasts 31 s",
        "gpupool: cell In[3] (--nowait): another",
        "gpupool: cell In[3] (--nowait): it lasts 1 min 2 s",
    ]


def test_a_quiet_cell_warns_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    make_view("quiet", (0, 1)).notice("rank 1 hangs.")
    assert capsys.readouterr().err == "gpupool: rank 1 hangs.\n"


def test_a_training_shows_its_notice_until_it_is_over(
    history_of: Callable[..., TrainingHistory],
) -> None:
    history = history_of()
    assert "hangs" not in history_html(history) + training_text(history)
    history.notice = "rank 1 <hangs>."
    assert "rank 1 &lt;hangs&gt;." in history_html(history)
    assert training_text(history).splitlines()[1] == "  rank 1 <hangs>."


def test_a_training_in_a_log_tells_it_on_a_line_of_its_own() -> None:
    history, stream = TrainingHistory(), io.StringIO()
    show = TextProgress(stream)
    for notice in ("rank 1 hangs for 31 s.", "rank 1 hangs for 46 s.", ""):
        history.notice = notice
        show(history)
    assert stream.getvalue() == "gpupool: rank 1 hangs for 31 s.\n"
