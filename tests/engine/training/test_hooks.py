"""What goes along with a training: callbacks, traces."""

from __future__ import annotations

import gzip
import json
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

import gpupool
from gpupool import Pool, SpmdError, TrainingOptions, TrainingResult
from gpupool.data.stores.writable import Target
from gpupool.engine.group.forming import World
from gpupool.engine.training.callbacks import CallbackInfo
from gpupool.engine.training.loop import fit
from tests.servers.s3 import SeaweedServer
from tests.support.pools import Pools
from tests.support.raising import raises, same_on
from tests.support.trainings import network, samples, train_on

ALONE = World(0, 1, torch.device("cpu"))


def note(info: CallbackInfo) -> None:
    """A callback that prints what it is told."""
    losses = [found and found.loss for found in (info.last, info.validation)]
    print(json.dumps([info.event, info.step, info.epoch, *losses]))


def stop_at(event: str, step: int, info: CallbackInfo) -> bool:
    """A callback that ends training at an event of a step, on rank 1 alone."""
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

    options = TrainingOptions(
        epochs=1,
        batch_size=4,
        callbacks=fails,
        checkpoint=str(tmp_path / "run"),
        profile=str(tmp_path / "traces"),
    )
    with pytest.raises(ValueError, match="no") as caught:
        fit(network(), samples(64), "cross_entropy", options, world=ALONE)
    assert f"fails, at {event!r} after step {step}," in caught.value.__notes__[0]
    running = {thread.name for thread in threading.enumerate()}
    assert "gpupool-checkpoint" not in running
    assert not torch.autograd._profiler_enabled()


def test_traces_in_s3(pools: Pools, s3: SeaweedServer) -> None:
    os.environ.update(s3.env)
    url = s3.make_bucket(f"board-{uuid4().hex}")
    pools[2].environment.set(s3.env)
    train(pools[2], epochs=4, profile=f"{url}/trace")
    traces = Target(f"{url}/trace")
    assert traces.names() == ["rank-0.pt.trace.json.gz", "rank-1.pt.trace.json.gz"]
    for name in traces.names():
        trace = json.loads(gzip.decompress(traces.get(name)))
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
    """A callback that prints, the ranks a line each that differs; and fails after four steps."""
    if info.event == "end":
        print(f"after step {info.step}")
        print(f"this is rank {info.rank}")
        if info.step == 4:
            raise RuntimeError("enough")


def test_what_ranks_print_is_shown_and_kept(
    pool2: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = TrainingOptions(epochs=1, batch_size=4, callbacks=[say])
    result = gpupool.train(network(), samples(8), options=options)
    shown = capsys.readouterr().out.splitlines()
    assert {"[0] this is rank 0", "[1] this is rank 1"} < set(shown)
    assert result.text(1) == "after step 2\nthis is rank 1\n"
    with pytest.raises(SpmdError):
        gpupool.train(network(), samples(16), options=options)
    assert "[0] this is rank 0" in capsys.readouterr().out  # also where it ends with an error
