"""Ranks that take no part in training: the others train in a group of their own.

There need not be a GPU for it: which ranks train is plain data for the engines.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from gpupool import Pool, PoolOptions, SpmdError, TrainingOptions, TrainingRun
from gpupool.core.jobs import InferenceJob
from gpupool.core.wire.calls import Predict
from gpupool.pool.calls.execution import Execution
from gpupool.pool.calls.output import OutputRecorder
from gpupool.training.job import send_job
from tests.support.pools import Pools
from tests.support.trainings import network, samples, train_on, wait_until, weights

ALL = "x = torch.ones(1); dist.all_reduce(x); x.item()"
DOUBLE = torch.float64
SETTINGS: dict[str, Any] = {"batch_size": 12, "lr": 0.1, "epochs": 3}


@pytest.fixture(scope="module")
def spare() -> Iterator[Pool]:
    """A pool of three where ranks 0 and 1 train, as if they had a GPU each and rank 2 none."""
    with Pool(PoolOptions(n=3, device="cpu")) as pool:
        placed = pool._all_ranks.placement
        pool._all_ranks.placement = replace(placed, training_ranks=(0, 1))
        pool._all_ranks.reform_group()
        pool.wait_until_usable()
        yield pool


@pytest.mark.long
def test_the_result_is_that_of_one_process(spare: Pool, pools: Pools) -> None:
    data, held_out = samples(50, DOUBLE), samples(17, DOUBLE, seed=1)
    ours = train_on(spare, network(DOUBLE), data, validation=held_out, **SETTINGS)
    alone = train_on(pools[1], network(DOUBLE), data, validation=held_out, **SETTINGS)
    assert (weights(ours.model) - weights(alone.model)).abs().max() < 1e-12
    assert ours.history.loss == pytest.approx(alone.history.loss, abs=1e-12)
    assert [v.num_samples for v in ours.history.validations] == [17] * 3
    assert ours.history.start is not None
    assert (ours.history.start.world_size, ours.history.start.backend) == (2, "gloo")


@pytest.mark.long
def test_the_spare_rank_is_free_while_the_others_train(spare: Pool) -> None:
    run = TrainingRun(
        spare, network(), Slow(64), "cross_entropy", TrainingOptions(batch_size=8, epochs=50), None
    )
    assert dict(spare.run("rank", ranks=2, timeout_s=30)) == {2: 2}
    assert not run.done()
    run.stop()
    assert run.result().stopped_by == "user"
    assert dict(spare.run(ALL)) == {0: 3.0, 1: 3.0, 2: 3.0}


@pytest.mark.long
def test_prediction_is_by_the_ranks_that_train(spare: Pool, tmp_path: Path) -> None:
    model, data = network(), samples(7)
    asked = InferenceJob(model, data, TrainingOptions(batch_size=4))
    job, result = send_job(spare, asked), tmp_path / "out"
    call = Predict(job.wire, str(result))
    ranks = spare.training_ranks
    recorder = OutputRecorder(ranks, frozenset())
    Execution(spare, dict.fromkeys(ranks, call), recorder).result()
    parts = [torch.load(f"{result}.{i}", weights_only=True) for i in range(2)]
    assert not Path(f"{result}.2").exists()
    shares = [share for batch in zip(*parts, strict=True) for share in batch]
    assert torch.allclose(torch.cat(shares), model(data.tensors[0]), atol=1e-6)


class Slow(TensorDataset):
    """Data that takes its time, so that a training lasts."""

    def __init__(self, num: int) -> None:
        super().__init__(*samples(num).tensors)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return super().__getitem__(index)


class Failing(nn.Module):
    """A network that raises on one rank alone, in its third step; the other one waits for it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner, self.rank, self.steps = network(), rank, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 3 and int(os.environ["RANK"]) == self.rank:
            raise ValueError("third step")
        return self.inner(inputs)


@pytest.mark.long
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_waits_in_the_training_group_is_freed(spare: Pool, failing: int) -> None:
    generation = spare.generation
    started = time.monotonic()
    with pytest.raises(SpmdError) as caught:
        train_on(spare, Failing(failing), samples(64), batch_size=8)
    assert time.monotonic() - started < 20
    assert caught.value.first.rank == failing
    assert "ValueError: third step" in str(caught.value)
    assert caught.value.errors[1 - failing].freed
    assert spare.generation == generation + 1
    assert dict(spare.run(ALL)) == {0: 3.0, 1: 3.0, 2: 3.0}
    train_on(spare, network(), samples(16), batch_size=8, epochs=1)


@pytest.mark.long
def test_both_groups_are_left_when_they_are_formed_again(spare: Pool) -> None:
    count = (
        "import os; from torch.distributed import distributed_c10d as c10d\n"
        "len(os.listdir('/proc/self/fd')), len(c10d._world.pg_map)"
    )

    def counted() -> tuple[list[int], list[int]]:
        found = dict(spare.run(count))
        return [found[rank][0] for rank in range(3)], [found[rank][1] for rank in range(3)]

    def is_no_more() -> bool:
        return all(one <= other for one, other in zip(counted()[0], descriptors, strict=True))

    spare._all_ranks.reform_group()
    descriptors, groups = counted()
    for _ in range(10):
        spare._all_ranks.reform_group()
        spare.wait_until_usable()
    assert counted()[1] == groups == [2, 2, 1]
    wait_until(is_no_more)  # what is not the group's may come and go


@pytest.mark.long
def test_descriptors_stay_flat_while_trainings_are_aborted(spare: Pool) -> None:
    count = "import os; len(os.listdir('/proc/self/fd'))"
    counts = []
    for i in range(8):
        with pytest.raises(SpmdError):
            train_on(spare, Failing(i % 2), samples(64), batch_size=8)
        counts.append(dict(spare.run(count)))
    # the last traceback may keep one generation's groups
    assert all(counts[-1][rank] <= counts[1][rank] + 12 for rank in range(3)), counts


PROCESS = """
import sys
import torch
import torch.distributed as dist
from gpupool.core.machine.topology import Rank
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.calls import GroupPlan
from gpupool.engine.group import forming
from gpupool.engine.training.loop import fit
from tests.support.trainings import network, samples, weights

rank, store, result = int(sys.argv[1]), sys.argv[2], sys.argv[3]
here = Rank(rank, 3, "cpu", None, 1)
forming.connect(GroupPlan(store, "gloo", [0, 1], "gloo"), here)
if rank < 2:
    world = forming.World.here(torch.device("cpu"))
    assert (world.rank, world.size, world.backend) == (rank, 2, "gloo")
    options = TrainingOptions(batch_size=12, lr=0.1, epochs=3)
    model = fit(network(torch.float64), samples(50, torch.float64), "cross_entropy", options,
                world=world).model
    torch.save(weights(model), f"{result}.{rank}")
else:
    assert forming.training_group() is None
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 3
forming.leave()
"""


@pytest.mark.long
def test_three_processes_without_a_pool(pools: Pools, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROCESS)
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    paths = [str(tmp_path / "store"), str(tmp_path / "weights")]
    processes = [
        subprocess.Popen([sys.executable, script, str(rank), *paths], env=environment)
        for rank in range(3)
    ]
    try:
        assert [process.wait(150) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    alone = train_on(pools[1], network(DOUBLE), samples(50, DOUBLE), **SETTINGS)
    for rank in range(2):
        found = torch.load(tmp_path / f"weights.{rank}", weights_only=True)
        assert (found - weights(alone.model)).abs().max() < 1e-12
