"""Training progress as text, on a terminal and in a log."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from gpupool.core.errors import OptionsError
from gpupool.core.terminal import FRESH_LINE
from gpupool.notebook.monitor.text import TextProgress
from gpupool.notebook.monitor.views import show_training
from gpupool.training.history import TrainingHistory
from tests.notebook.feed import Run
from tests.support.raising import raises

HistoryOf = Callable[..., TrainingHistory]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def with_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `Terminal` is knows how to draw a line over."""
    monkeypatch.setenv("TERM", "xterm-256color")


def replay(progress: TextProgress, whole: TrainingHistory) -> None:
    """Report `whole` event by event, and the end twice, as a run does."""
    history = TrainingHistory()
    assert whole.start
    assert whole.end
    history.add(whole.start)
    validations = {event.step: event for event in whole.validations}
    for step in whole.steps:
        history.add(step)
        progress(history)
        if step.step in validations:
            history.add(validations[step.step])
            progress(history)
    history.add(whole.end)
    progress(history)
    progress(history)


def test_a_log_has_a_line_per_epoch_validation_and_end(history_of: HistoryOf) -> None:
    stream = io.StringIO()
    replay(TextProgress(stream), history_of(num_epochs=2, steps_per_epoch=3))
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[:3] for line in lines] == [
        ["training", "epoch 1/2", "step 3/6"],
        ["training", "epoch 1/2", "step 3/6"],
        ["training", "epoch 2/2", "step 6/6"],
        ["training", "epoch 2/2", "step 6/6"],
        ["finished", "epoch 2/2", "step 6/6"],
    ]
    assert ["  val " in line for line in lines] == [False, True, True, True, True]
    assert "\r" not in stream.getvalue()


def test_a_terminal_line_is_redrawn_ten_times_a_second(history_of: HistoryOf) -> None:
    now = 0.0
    stream = Terminal()
    progress = TextProgress(stream, clock=lambda: now)
    for number in range(100):  # one second
        progress(history_of(num_steps=1 + number))
        now += 0.01
    assert 9 <= stream.getvalue().count("\r") <= 10
    assert "\n" not in stream.getvalue()


@pytest.mark.parametrize("kind", ["dumb", ""])
def test_a_terminal_without_a_cursor_gets_lines(
    history_of: HistoryOf, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("TERM", kind) if kind else monkeypatch.delenv("TERM")
    stream = Terminal()
    replay(TextProgress(stream), history_of(num_epochs=1, steps_per_epoch=2))
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().splitlines()[-1].startswith("finished  epoch 1/1")


def pieces(reader: int) -> Iterator[str]:
    """What has come through a terminal that is closed at its other end."""
    with contextlib.suppress(OSError):  # there is no more
        while True:
            yield os.read(reader, 1000).decode()


def test_it_works_on_a_real_terminal_and_needs_only_the_standard_library() -> None:
    script = (
        "import sys\n"
        "from gpupool.notebook.monitor.text import TextProgress\n"
        "from gpupool.training.history import TrainingHistory\n"
        "progress = TextProgress(sys.stderr)\n"
        "progress(TrainingHistory())\n"
        "progress(TrainingHistory(status='finished'))\n"
        "heavy = {'IPython', 'ipywidgets', 'anywidget', 'torch', 'ipyparallel'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    reader, terminal = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=terminal, check=True
        )
        os.close(terminal)  # so that reading has an end
        shown = "".join(pieces(reader))
    finally:
        os.close(reader)
    assert done.stdout.decode().strip() == "[]"
    assert shown == f"{FRESH_LINE}starting{FRESH_LINE}finished\r\n"


def test_a_stderr_that_was_closed_before_gets_nothing() -> None:
    script = (
        "import sys\n"
        "from gpupool.notebook.page.progress_view import open_drawing\n"
        "from gpupool.notebook.monitor.views import show_training\n"
        "from gpupool.core.progress import Course\n"
        "from tests.notebook.feed import Run\n"
        "assert sys.stderr is None\n"
        "show_training(Run())\n"
        "print(open_drawing(Course('Listing', 1, None, 'files', '', 2.0)))\n"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, script]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "None\n"


def test_a_plot_without_a_notebook_is_refused() -> None:
    with raises(OptionsError, "progress"):
        show_training(Run(), "plot")
