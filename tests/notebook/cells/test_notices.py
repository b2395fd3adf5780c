"""Notices of a running cell or training, where there is no notebook to draw them in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpupool.notebook.monitor.board import training_text
from gpupool.notebook.monitor.picture import history_html
from gpupool.pool.notices import NoticeLines
from gpupool.training.history import TrainingHistory


def test_each_notice_is_told_once_until_it_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    tell = NoticeLines("cell In[3] (--nowait)")
    for text in ("it lasts 31 s", "it lasts 46 s", "another", None, "it lasts 1 min 2 s"):
        tell(text)
    assert capsys.readouterr().err.splitlines() == [
        "gpupool: cell In[3] (--nowait): it lasts 31 s",
        "gpupool: cell In[3] (--nowait): another",
        "gpupool: cell In[3] (--nowait): it lasts 1 min 2 s",
    ]


def test_a_training_shows_its_notice_until_it_is_over(
    history_of: Callable[..., TrainingHistory],
) -> None:
    history = history_of()
    assert "hangs" not in history_html(history) + training_text(history)
    history.notice = "rank 1 <hangs>."
    assert "rank 1 &lt;hangs&gt;." in history_html(history)
    assert training_text(history).splitlines()[1] == "  rank 1 <hangs>."
