"""What the client makes of events: a history without holes, also of a training that went on."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpupool.core.options.training_options import Profile, TrainingOptions
from gpupool.core.wire.events import (
    CheckpointEvent,
    EndEvent,
    ProgressEvent,
    ResumeEvent,
    StartEvent,
    StepEvent,
    ValidationEvent,
    WarningEvent,
)
from gpupool.notebook.monitor.picture import history_html, training_text
from gpupool.notebook.monitor.words import headline, remaining
from gpupool.training.history import TrainingHistory
from gpupool.training.job import with_absolute_paths

START = StartEvent(2, 4, 32, 8, 2, "CPU", "gloo")


def step(number: int, loss: float = 1.0) -> StepEvent:
    return StepEvent(number, (number - 1) // 4 + 1, loss, 0.5, 0.1, 8, 0.1 * number, 0.0)


def checkpoint(number: int) -> CheckpointEvent:
    return CheckpointEvent(number, f"s3://a/step-{number:08}.pt")


def history_of(*events: object) -> TrainingHistory:
    history = TrainingHistory()
    for event in events:
        history.add(event)  # type: ignore[arg-type]
    return history


def test_a_new_start_forgets_what_is_told_again() -> None:
    history = history_of(START, step(1), step(2), checkpoint(2), WarningEvent("data", "waited", 2))
    history.restarts = ["rank 1 was killed"]
    assert history.newest == checkpoint(2)
    for event in (START, ResumeEvent(2, "s3://a/step-00000002.pt"), step(1), step(2)):
        history.add(event)
    assert [s.step for s in history.steps] == [1, 2]
    assert history.warnings == []
    assert history.checkpoint is None
    assert (history.newest, history.throughput) == (history.resumed, 80.0)
    assert history.restarts == ["rank 1 was killed"]


def test_pictures_tell_warnings_metrics_the_best_and_checkpoints() -> None:
    history = history_of(
        START,
        ResumeEvent(1, "s3://a/step-00000001.pt"),
        step(1),
        step(2),
        ValidationEvent(2, 1, 0.5, 0.9, 10, 0.3, {"f1": 0.875}, is_best=True),
        ValidationEvent(2, 1, 0.6, 0.8, 10, 0.3, {"f1": 0.75}),
        checkpoint(2),
        WarningEvent("not finite", "the loss is nan in step 2", 2),
    )
    history.restarts = ["rank 1 was killed by SIGKILL; it was replaced"]
    assert history.best is history.validations[0]
    for shown in (training_text(history).lower(), history_html(history).lower()):
        for part in ("the loss is nan in step 2", "rank 1 was killed by sigkill", "75.0 %"):
            assert part in shown
        assert shown.count("after step 2") == 2  # the best one, the checkpoint
        assert shown.count("after step 1") == 1  # where it was resumed


def test_relative_folders_are_those_of_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = with_absolute_paths(
        TrainingOptions(
            checkpoint="run",
            resume="old/step-00000003.pt",
            tensorboard="s3://bucket/board",
            profile=Profile(url="../traces"),
        )
    )
    assert options.checkpoint == str(tmp_path / "run")
    assert options.resume == str(tmp_path / "old/step-00000003.pt")
    assert options.tensorboard == "s3://bucket/board"
    assert options.profile is not None
    assert options.profile.url == str(tmp_path.parent / "traces")
    plain = TrainingOptions(checkpoint="/run", resume="auto")
    assert with_absolute_paths(plain) == plain


def test_what_goes_on_beside_the_steps_is_said_with_how_far_it_is() -> None:
    history = TrainingHistory()
    history.add(START)
    history.add(StepEvent(1, 1, 0.5, None, 0.1, 8, 0.1, 0.0))
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
    history.add(StepEvent(2, 1, 0.5, None, 0.1, 8, 0.1, 0.0))
    assert headline(history) == "Training: epoch 1 of 2"
    history.add(ProgressEvent("saving the last checkpoint", 0, 0))
    history.add(EndEvent("epochs", 2, 0.2))
    assert (history.stage, headline(history)) == ("", "Finished: 2 epochs in 0.2 s")
