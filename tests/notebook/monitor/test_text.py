"""Training progress as text, on a terminal and in a log."""

from __future__ import annotations

import io
from collections.abc import Callable

from gpupool.notebook.monitor.views import TextProgress
from gpupool.training.history import TrainingHistory

HistoryOf = Callable[..., TrainingHistory]


def test_a_log_has_a_line_per_epoch_validation_and_end(history_of: HistoryOf) -> None:
    stream, history = io.StringIO(), TrainingHistory()
    progress, whole = TextProgress(stream), history_of(num_epochs=2, steps_per_epoch=3)
    validations = {event.step: event for event in whole.validations}
    events = [one for step in whole.steps for one in (step, validations.get(step.step)) if one]
    for event in (whole.start, *events, whole.end):
        assert event
        history.add(event)
        progress(history)
    progress(history)  # the end twice, as a run does
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
