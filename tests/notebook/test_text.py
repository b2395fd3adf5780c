"""Training progress as text, on a terminal and in a log."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable

import pytest

from gpupool.core.events import EndEvent, StepEvent
from gpupool.notebook.text import TextProgress
from gpupool.training.history import TrainingHistory

HistoryOf = Callable[..., TrainingHistory]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


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
    assert ["validation" in line for line in lines] == [False, True, True, True, True]
    assert "\r" not in stream.getvalue()


def test_a_terminal_line_is_redrawn_ten_times_a_second(history_of: HistoryOf) -> None:
    now = 0.0
    stream = Terminal()
    progress = TextProgress(stream, clock=lambda: now)
    history = history_of(num_steps=1)
    for _ in range(100):  # one second
        progress(history)
        now += 0.01
    assert 9 <= stream.getvalue().count("\r") <= 10
    assert "\n" not in stream.getvalue()


def test_a_shorter_terminal_line_leaves_no_rest(
    history_of: HistoryOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    progress = TextProgress(stream, clock=iter([0.0, 1.0, 2.0]).__next__)
    history = history_of(num_steps=5)
    progress(history)
    assert len(stream.getvalue()) == 1 + 59  # cut: a wrapped line could not be drawn over
    failed = TrainingHistory(status="failed", error="rank 1 died")
    progress(failed)
    assert stream.getvalue().endswith("\r" + "failed: rank 1 died".ljust(59) + "\n")


def test_the_last_terminal_line_is_whole_and_written_once(history_of: HistoryOf) -> None:
    stream = Terminal()
    replay(TextProgress(stream), history_of(num_epochs=1, steps_per_epoch=2))
    last = stream.getvalue().split("\r")[-1]
    assert last.startswith("finished  epoch 1/1  step 2/2  loss 0.")
    assert stream.getvalue().count("\n") == 1


def test_it_works_on_a_real_terminal_and_needs_only_the_standard_library() -> None:
    script = (
        "import sys\n"
        "from gpupool.notebook.text import TextProgress\n"
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
        shown = os.read(reader, 1000).decode()
    finally:
        os.close(reader)
        os.close(terminal)
    assert done.stdout.decode().strip() == "[]"
    assert shown == "\rstarting\rfinished\r\n"


def test_an_early_stop_is_the_last_line(history_of: HistoryOf) -> None:
    history = history_of(num_steps=4)
    stream = io.StringIO()
    progress = TextProgress(stream)
    history.add(EndEvent("user", 4, 1.0))
    progress(history)
    history.steps.append(StepEvent(5, 1, 1.0, None, 0.1, 512, 2.0, 0.0))
    progress(history)
    assert stream.getvalue().startswith("stopped  epoch 1/6  step 4/900")
    assert stream.getvalue().count("\n") == 1
