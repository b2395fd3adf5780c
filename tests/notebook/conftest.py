"""Histories to draw."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpupool.training.history import TrainingHistory
from tests.notebook.feed import training_events


@pytest.fixture
def history_of() -> Callable[..., TrainingHistory]:
    """Makes a history of `training_events(**arguments)`."""

    def make(**arguments: int | None) -> TrainingHistory:
        history = TrainingHistory()
        for event in training_events(**arguments):  # type: ignore[arg-type]
            history.add(event)
        return history

    return make
