"""What the client makes of events: a history without holes, also of a training that went on."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

import gpupool
from gpupool import Pool, TrainingError
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.events import (
    CheckpointEvent,
    EndEvent,
    ProgressEvent,
    ResumeEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
)
from gpupool.notebook.monitor.words import headline, remaining
from gpupool.notebook.page.markup import table_html
from gpupool.training.history import TrainingHistory
from gpupool.training.job import with_absolute_paths
from gpupool.training.result import RESULTS
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on

START = StartEvent(2, 4, 32, 8, 2, "CPU", "gloo")


def step(number: int, loss: float = 1.0) -> StepEvent:
    return StepEvent(number, (number - 1) // 4 + 1, loss, 0.5, 0.1, 8, 0.1 * number)


def checkpoint(number: int) -> CheckpointEvent:
    return CheckpointEvent(number, f"s3://a/step-{number:08}.pt")


def history_of(*events: object) -> TrainingHistory:
    history = TrainingHistory()
    for event in events:
        history.add(event)  # type: ignore[arg-type]
    return history


def test_a_new_start_forgets_what_is_told_again() -> None:
    history = history_of(START, step(1), step(2), checkpoint(2), WarningEvent("waited", 2))
    history.restarts = ["rank 1 was killed"]
    assert history.newest == checkpoint(2)
    for event in (START, ResumeEvent(2, "s3://a/step-00000002.pt"), step(1), step(2)):
        history.add(event)
    assert [s.step for s in history.steps] == [1, 2]
    assert history.warnings == []
    assert history.checkpoint is None
    assert (history.newest, history.throughput) == (history.resumed, 80.0)
    assert history.restarts == ["rank 1 was killed"]


def test_relative_folders_are_those_of_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = TrainingOptions(checkpoint="run", resume="old/step-00000003.pt", profile="../traces")
    options, here = with_absolute_paths(given), str(tmp_path)
    assert (options.checkpoint, options.resume) == (f"{here}/run", f"{here}/old/step-00000003.pt")
    assert options.profile == str(tmp_path.parent / "traces")
    plain = TrainingOptions(checkpoint="/run", resume="auto", profile="s3://bucket/traces")
    assert with_absolute_paths(plain) == plain


def test_what_goes_on_beside_the_steps_is_said_with_how_far_it_is() -> None:
    history = history_of(START, StepEvent(1, 1, 0.5, None, 0.1, 8, 0.1))
    usual = remaining(history)
    history.add(ProgressEvent("saving the network", 12_300_000, 98_000_000, "B"))
    assert headline(history) == "Training: epoch 1 of 2, saving the network"
    assert remaining(history) == "12.3 of 98.0 MB"
    assert "  saving the network (12.3 of 98.0 MB)  " in history.line()
    assert headline(history, "stopping") == "Stopping: saving the network"
    history.add(ProgressEvent("saving the network", 98_000_000, 98_000_000, "B"))
    assert (headline(history), remaining(history)) == ("Training: epoch 1 of 2", usual)
    history.add(ProgressEvent("reading the network", 0, 0))
    assert headline(history) == "Training: epoch 1 of 2, reading the network"
    assert remaining(history) == usual
    history.add(StepEvent(2, 1, 0.5, None, 0.1, 8, 0.1))
    assert headline(history) == "Training: epoch 1 of 2"
    history.add(ProgressEvent("saving the last checkpoint", 0, 0))
    history.add(EndEvent("epochs", 2, 0.2))
    assert (history.stage, headline(history)) == ("", "Finished: 2 epochs in 0.2 s")


# ---- trainings side by side, and a history as a frame --------------------------------------------


def test_trainings_stand_side_by_side(pool2: Pool) -> None:
    data = samples(60)
    one = train_on(pool2, network(), data, epochs=3, batch_size=10, validation=data)
    two = train_on(pool2, network(), data, epochs=2, batch_size=20)
    found = gpupool.compare(one, two.history)
    assert found.columns == ("", "epochs", "batch_size", *RESULTS)
    assert [row[:5] for row in found.rows] == [
        ("1", "3", "10", "2", "18"),
        ("2", "2", "20", "2", "6"),
    ]
    last = dict(zip(found.columns, found.rows[1], strict=True))
    assert last["Loss"] == f"{sum(two.history.loss[3:]) / 3:.4g}"
    assert "after step" in found.rows[0][-1]
    assert repr(found).splitlines()[1].split()[:3] == ["1", "3", "10"]
    assert gpupool.compare(one, one).columns == ("", *RESULTS)
    named = gpupool.compare(one, two, names=["few <b>", "many"])
    assert [row[0] for row in named.rows] == ["few <b>", "many"]
    html = table_html(named)
    assert "few &lt;b&gt;" in html
    ElementTree.fromstring(html)
    with raises(TrainingError):
        gpupool.compare(one, {"loss": 3})
    with raises(TrainingError, "names"):
        gpupool.compare(one, two, names=["one"])


def test_a_history_is_a_frame_with_a_row_for_each_step(pool2: Pool) -> None:
    pytest.importorskip("pandas")
    data = samples(60)
    result = train_on(
        pool2,
        network(),
        data,
        epochs=2,
        batch_size=20,
        validation=samples(20, seed=1),
        metrics=["f1"],
    )
    frame = result.history.to_frame()
    assert list(frame.index) == [1, 2, 3, 4, 5, 6]
    assert frame.loss.tolist() == [step.loss for step in result.history.steps]
    assert result.best is not None
    assert frame.validation_f1.dropna().tolist() == [
        event.metrics["f1"] for event in result.history.validations
    ]
    assert math.isnan(frame.validation_loss[1])
    assert frame.validation_accuracy[3] == result.history.validations[0].accuracy
    assert gpupool.TrainingHistory().to_frame().empty
