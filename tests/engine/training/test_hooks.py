"""What goes along with a training: callbacks, traces."""

from __future__ import annotations

import gzip
import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gpupool
from gpupool import Pool, SpmdError, TrainingOptions, TrainingResult
from gpupool.engine.training.callbacks import CallbackInfo
from tests.engine.training.test_option_effects import trained
from tests.support.pools import Pools
from tests.support.raising import raises, same_on
from tests.support.trainings import network, samples, train_on


def note(info: CallbackInfo) -> None:
    losses = [found and found.loss for found in (info.last, info.validation)]
    print(json.dumps([info.event, info.step, info.epoch, *losses]))


def stop_at(event: str, step: int, info: CallbackInfo) -> bool:
    return (info.event, info.step, info.rank) == (event, step, 1)


def train(pool: Pool, *, epochs: int = 1, **settings: Any) -> TrainingResult:
    """Of four steps an epoch."""
    return train_on(pool, network(), samples(16), batch_size=4, epochs=epochs, **settings)


def test_callbacks_hear_of_six_events_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    saved = {"checkpoint": str(tmp_path / "run"), "validation": samples(8)}
    result = train(pools[2], epochs=2, callbacks=[note], **saved)
    assert result.text(0) == result.text(1)
    told = [json.loads(line) for line in result.text(0).splitlines()]
    epoch = ["step"] * 4 + ["validation", "epoch", "checkpoint"]
    assert [line[0] for line in told] == ["start", *epoch, *epoch, "end"]
    assert [line[1:3] for line in told if line[0] == "epoch"] == [[4, 1], [8, 2]]
    at_last_step = next(line for line in told if line[:2] == ["step", 8])
    assert at_last_step[3] == result.history.loss[3]  # of the last report before it
    assert (told[0][3], told[-1][4]) == (None, result.history.validations[-1].loss)


@pytest.mark.parametrize(
    ("event", "step"),
    [("start", 0), ("step", 3), ("validation", 4), ("epoch", 4), ("checkpoint", 6)],
)
def test_true_from_one_rank_ends_training_on_all(
    pools: Pools, tmp_path: Path, event: str, step: int
) -> None:
    saved = {"checkpoint": str(tmp_path), "checkpoint_every": 3, "validation": samples(8)}
    result = train(pools[2], epochs=5, callbacks=[partial(stop_at, event, step)], **saved)
    assert (result.stopped_by, result.history.status) == ("callback", "stopped")
    assert len(result.history.steps) == step


@pytest.mark.parametrize(("event", "step"), [("start", 0), ("step", 12), ("end", 16)])
def test_an_error_in_a_callback_names_it_and_leaves_nothing_running(
    tmp_path: Path, event: str, step: int
) -> None:
    def fails(info: CallbackInfo) -> None:
        if (info.event, info.step) == (event, step):
            raise ValueError("no")

    folders = {"checkpoint": str(tmp_path / "run"), "profile": str(tmp_path / "traces")}
    with pytest.raises(ValueError, match="no") as caught:
        trained(network(), samples(64), epochs=1, batch_size=4, callbacks=fails, **folders)
    assert f"fails, at {event!r} after step {step}," in caught.value.__notes__[0]
    running = {thread.name for thread in threading.enumerate()}
    assert "gpupool-checkpoint" not in running
    assert not torch.autograd._profiler_enabled()


def test_a_trace_is_of_five_steps(pools: Pools, tmp_path: Path) -> None:
    train(pools[2], epochs=4, profile=str(tmp_path))
    for rank in (0, 1):
        path = tmp_path / f"rank-{rank}.pt.trace.json.gz"
        trace = json.loads(gzip.decompress(path.read_bytes()))
        named = [event.get("name", "") for event in trace["traceEvents"]]
        assert sum("Optimizer.step" in name for name in named) == 5
        assert any("linear" in name for name in named)


def test_what_can_no_longer_be_written_is_a_warning(pools: Pools, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def spoils(info: CallbackInfo) -> None:
        if info.event == "step" and info.step == 1 and info.rank == 0:
            folder.rename(tmp_path / "moved")
            folder.touch()

    result = train(pools[2], epochs=3, callbacks=spoils, profile=str(folder))
    assert result.stopped_by == "epochs"
    told = "\n".join(result.warnings)
    for rank in (0, 1):
        assert f"a trace could not be written: {folder}/rank-{rank}.pt" in told
    # A file is no folder: before training it is an error.
    with raises(SpmdError, str(folder), ename="TrainingError") as caught:
        train(pools[2], profile=str(folder))
    assert same_on(caught.value, 0, 1)


def say(info: CallbackInfo) -> None:
    print(f"this is rank {info.rank}")
    raise RuntimeError("enough")


def test_what_ranks_print_is_shown_also_where_it_ends_with_an_error(
    pool2: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    with raises(SpmdError, "enough"):
        gpupool.train(network(), samples(8), options=TrainingOptions(callbacks=[say]))
    shown = capsys.readouterr().out.splitlines()
    assert {"[0] this is rank 0", "[1] this is rank 1"} <= set(shown)
