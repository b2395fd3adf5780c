"""What a device had not computed when collectives were aborted is in no checkpoint, and is said.

The ranks have a device that lags behind the host, as a GPU does (`tests/support/lagging.py`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gpupool import Pool, PoolOptions, SpmdError, TrainingOptions, TrainingRun
from gpupool.engine.checkpoint.files import Checkpoints, step_of
from tests.support import lagging

NUM_STEPS, BATCH = 45, 6
SEEDS = [pytest.param(seed, marks=[pytest.mark.long] * (seed >= 6)) for seed in range(50)]


class Points(Dataset[Any]):
    """What a network of 8 inputs learns; `rank` fails when it has read `num_sound` of them."""

    def __init__(self, rank: int = -1, num_sound: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(NUM_STEPS * BATCH, 8, generator=generator)
        self.targets = self.inputs[:, :3].sin()
        self.rank, self.num_sound = rank, num_sound
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.num_read += 1
        if os.environ["RANK"] == str(self.rank) and self.num_read > self.num_sound:
            raise OSError("the disk is gone")
        return self.inputs[index], self.targets[index]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    )


def train(pool: Pool, points: Points, folder: Path, **settings: Any) -> TrainingRun:
    """A training that keeps all of its checkpoints, and reports so rarely that the host runs
    ahead."""
    defaults = {"checkpoint_every": 16, "optimizer": "sgdm"}
    options = TrainingOptions(
        epochs=1,
        batch_size=BATCH,
        lr=0.1,
        seed=3,
        keep="last",
        checkpoint=str(folder),
        num_checkpoints=100,
        **(defaults | settings),
    )
    return TrainingRun(pool, network(), points, "mse", options, None)


def states(folder: Path) -> dict[int, dict[str, Any]]:
    """Step -> the network in its checkpoint, of all that are sealed."""
    found = Checkpoints(str(folder))
    return {step_of(name): found.load(name)["model"] for name in found.names()}


# ---- trainings -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def behind() -> Iterator[Pool]:
    """Two ranks whose device lags."""
    with Pool(PoolOptions(n=2, device="cpu")) as pool:
        pool.run(lagging.install)
        yield pool


@pytest.fixture(scope="module")
def undisturbed(behind: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Step -> the network after it, in a training that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(behind, Points(), folder, checkpoint_every=1).result()
    found = states(folder)
    assert sorted(found) == [*range(1, NUM_STEPS + 1)]
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_no_checkpoint_holds_a_step_that_was_not_complete(
    behind: Pool, undisturbed: dict[int, Any], tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    points = Points(draw.randrange(2), draw.randrange(3 * NUM_STEPS))  # each rank reads half
    run = train(behind, points, tmp_path)
    with pytest.raises(SpmdError) as caught:
        run.result()
    assert caught.value.first.ename == "OSError"
    found = states(tmp_path)
    assert all(same(model, undisturbed[step]) for step, model in found.items())
    if any("had completed" in one.message for one in run.history.warnings):
        newest = max(found, default=0)
        assert not newest or f"The checkpoint after step {newest} is" in caught.value.first.hint


@pytest.mark.long
def test_some_of_these_trainings_were_ahead_of_their_device(behind: Pool) -> None:
    assert sum(behind.run(lagging.num_failed).values()) > 0


# ---- cells -----------------------------------------------------------------------------------

LOOP = """
import itertools
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
other = torch.ones(2)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in itertools.count():
    if rank == 1 and step == 20:
        raise ValueError("no more data")
    optimizer.zero_grad()
    parallel(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.long
def test_after_a_failed_loop_its_tensors_are_said_to_be_unfinished(behind: Pool) -> None:
    with pytest.raises(SpmdError) as caught:
        behind.run(LOOP)
    assert caught.value.first.ename == "ValueError"
    assert "may hold unfinished numbers on every rank" in caught.value.first.hint


def test_an_error_that_aborts_nothing_says_nothing_of_tensors(behind: Pool) -> None:
    with pytest.raises(SpmdError) as caught:
        behind.run("x = torch.ones(2, 2)\nfor _ in range(100): x = x @ x\n1 / 0", ranks=[0])
    assert "unfinished" not in caught.value.first.hint


LATER = """
import time
from gpupool.data import device as devices
lag = devices.of("cpu")
def work():
    go_on.wait()
    {then}
import threading
go_on = threading.Event()
lag.give(work)
threading.Timer(0.5, go_on.set).start()
"""


def test_a_cell_ends_when_its_device_does(behind: Pool) -> None:
    behind.run(LATER.format(then="lag.was_done = True"))
    assert set(behind.run("lag.was_done").values()) == {True}


def test_a_cell_need_not_wait_for_its_device(behind: Pool) -> None:
    source = LATER.format(then="pass").replace("threading.Timer(0.5, go_on.set).start()", "")
    behind.begin(source, ranks=(0, 1), on_output=lambda *_: None, waits_for_gpu=False).result()
    found = behind.begin(
        "lag.is_done()", ranks=(0, 1), on_output=lambda *_: None, waits_for_gpu=False
    ).result()
    assert [reply.text for reply in found.values()] == ["False", "False"]
    behind.run("go_on.set()")


def test_an_error_of_the_device_is_that_of_the_cell_that_gave_the_work(behind: Pool) -> None:
    with pytest.raises(SpmdError) as caught:
        behind.run(LATER.format(then="raise RuntimeError('device-side assert')"))
    assert caught.value.first.evalue == "device-side assert"
    assert dict(behind.run("rank")) == {0: 0, 1: 1}


def test_an_all_reduce_of_one_rank_alone_is_a_hang_of_its_own_cell(behind: Pool) -> None:
    cell = behind.begin(
        "if rank == 0: dist.all_reduce(torch.ones(3))", ranks=(0, 1), on_output=lambda *_: None
    )
    assert not cell.wait(1.0)
    cell.interrupt()
    with pytest.raises(SpmdError) as caught:
        cell.result()
    assert [*caught.value.errors] == [0]
    total = behind.run("x = torch.ones(1); dist.all_reduce(x); x.item()")
    assert dict(total) == {0: 2.0, 1: 2.0}
