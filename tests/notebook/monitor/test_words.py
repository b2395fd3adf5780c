"""The words beside the curves: what is told, and when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from gpupool.core.wire.events import (
    CheckpointEvent,
    DataEvent,
    Event,
    RankEvent,
    ResumeEvent,
    StartEvent,
    StepEvent,
    ValidationEvent,
)
from gpupool.notebook.monitor import words
from gpupool.notebook.monitor.result_view import validation_text
from gpupool.training.history import TrainingHistory

START = StartEvent(2, 4, 32, 8, 2, "CPU", "gloo", ranks=(0, 1), devices=("CPU", "CPU"))
STEP = StepEvent(1, 1, 0.5, None, 0.1, 8, 0.1, 0.0)


def history_of(events: Iterable[Event]) -> TrainingHistory:
    history = TrainingHistory()
    for event in events:
        history.add(event)
    return history


def rows(history: TrainingHistory) -> dict[str, str]:
    return {label: value for _, section in words.table(history) for label, value in section}


def test_there_is_a_row_for_what_was_told() -> None:
    read = DataEvent(1, 1, 2, "503 SlowDown", 1, {"s3://a/1.jpg": "damaged"}, "8 workers")
    shown = rows(history_of([START, STEP, read, CheckpointEvent(1, "s3://a/b")]))
    assert shown["Read by"] == "8 workers"
    assert shown["Reads retried"] == "2 (503 SlowDown)"
    assert shown["Samples skipped"] == "1"
    assert shown["Checkpoint"] == "after step 1"


def test_a_rank_on_another_host_has_its_name_beside_it() -> None:
    there = replace(START, hosts=("gpu1", "gpu2"))
    assert [row.rank for row in words.rank_rows(history_of([there]))] == ["0 (gpu1)", "1 (gpu2)"]
    assert [row.rank for row in words.rank_rows(history_of([START]))] == ["0", "1"]


def test_a_metric_has_one_row_and_shares_are_in_percent() -> None:
    start = replace(START, validate_every=4, metrics=("accuracy", "f1", "rmse"), objective="f1")
    metrics = {"accuracy": 0.75, "f1": 0.875, "rmse": 0.875}
    event = ValidationEvent(1, 1, 0.5, 0.75, 8, 0.2, metrics, is_best=True)
    wanted = {
        "Validation accuracy": "75.0 %",
        "Validation loss": "0.5",
        "Validation f1": "87.5 %",
        "Validation rmse": "0.875",
        "Best validation": "f1 87.5 % after step 1",
    }
    shown = rows(history_of([start, replace(STEP, accuracy=0.5), event]))
    assert {name: value for name, value in shown.items() if "alidation" in name} == wanted
    # Where the steps have no accuracy, that of the metric is the only one.
    other = rows(history_of([start, STEP, replace(event, accuracy=None)]))
    assert other["Validation accuracy"] == "75.0 %"
    said = "loss 0.5, accuracy 75.0 %, f1 87.5 %, rmse 0.875"
    assert validation_text(event) == f"Validation after step 1 (epoch 1): {said}"


def test_what_was_not_asked_for_has_no_row() -> None:
    shown = rows(history_of([START, STEP]))
    assert not {"Validation loss", "Frequency", "Patience", "Checkpoint", "Resumed", "Start",
                "Reads retried", "Training accuracy"} & {*shown}  # fmt: skip
    stream = rows(history_of([replace(START, steps_per_epoch=0, validate_every=-1), STEP]))
    assert "Steps per epoch" not in stream
    assert stream["Frequency"] == "every epoch"
    assert stream["Step"] == "1"
    resumed = rows(history_of([START, ResumeEvent(1, "s3://a/b"), STEP]))
    assert resumed["Resumed"] == "after step 1"


def test_patience_counts_validations_since_the_best() -> None:
    start = replace(START, validate_every=1, patience=3)
    events: list[Event] = [start]
    for number, is_best in enumerate([True, False, False], start=1):
        events.append(replace(STEP, step=number))
        events.append(ValidationEvent(number, 1, 0.5, None, 8, 0.1 * number, {}, is_best))
    assert rows(history_of(events))["Patience"] == "2 of 3"
    assert rows(history_of(events[:3]))["Patience"] == "0 of 3"


def told(*work_ms: float, step_ms: float = 50.0) -> TrainingHistory:
    return history_of(
        RankEvent(rank, 1, work / 1000, step_ms / 1000) for rank, work in enumerate(work_ms)
    )


def test_the_slowest_is_one_that_the_others_wait_for() -> None:
    assert told(20, 20, 30).slowest == (2, pytest.approx(0.5))
    assert told(20, 20, 22).slowest is None  # 10 % longer
    assert told(2, 2, 4).slowest is None  # 2 ms of 50
    assert told(20).slowest is None
    assert told(40, 10).slowest == (0, pytest.approx(3.0))
