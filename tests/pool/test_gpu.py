"""Pools on a machine with an NVIDIA GPU; one is enough."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import gpupool
from gpupool import TrainingOptions
from gpupool.core.errors import PlacementError
from gpupool.core.machine.gpus import discover
from gpupool.core.machine.topology import Gpu
from gpupool.pool import session
from tests.support.processes import notebook
from tests.support.raising import raises
from tests.support.trainings import network, samples

pytestmark = pytest.mark.gpu

SUM = "x = torch.ones(1, device=device); dist.all_reduce(x); x.item()"


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """The first GPU, which no pool of ours uses before the test nor after it."""
    session.stop()
    yield discover().usable[0]
    session.stop()


def test_the_table_names_the_rank_and_the_process_that_holds_memory(gpu: Gpu) -> None:
    with gpupool.start(n=1, gpus=gpu.uuid) as pool:
        pool.run("kept = torch.ones(2**28, device=device)")  # 1 GiB
        table = gpupool.gpus()
        row = next(seen for seen in table if seen.uuid == gpu.uuid)
        assert table.selected == {gpu.uuid: "rank 0"}
        assert (row.used_memory_bytes or 0) >= 2**30
        if all(process.name == "?" for process in row.processes):
            pytest.skip("the driver does not tell the processes of this container")
        holder = next(p for p in row.processes if p.pid == pool.status().pids[0])
        assert holder.user
        assert (holder.used_memory_bytes or 2**30) >= 2**30
        assert f"{holder.pid} (" in repr(table)
    assert gpupool.gpus().selected == {}


def test_a_rank_beyond_the_gpus_is_there_and_takes_no_part_in_training(gpu: Gpu) -> None:
    with gpupool.start(n=2, gpus=gpu.uuid) as pool:
        assert (pool.backend, pool.status().training_backend) == ("gloo", "nccl")
        assert pool.training_ranks == (0,)
        assert dict(pool.run("str(device)")) == {0: "cuda:0", 1: "cpu"}
        assert dict(pool.run("torch.cuda.device_count()")) == {0: 1, 1: 0}
        assert dict(pool.run(SUM)) == {0: 2.0, 1: 2.0}
        options = TrainingOptions(batch_size=8, epochs=2, lr=0.1)
        result = gpupool.train(network(), samples(32), options=options)
        start = result.history.start
        assert start is not None
        assert (start.world_size, start.backend) == (1, "nccl")
        assert start.device in gpu.name
        assert gpupool.predict(result.model, samples(5)).shape == (5, 3)


OTHER = """
import sys, time
import gpupool
pool = gpupool.start(gpus=sys.argv[1])
print(pool.ranks[0].gpu.uuid, flush=True)
time.sleep(120)
"""


def test_two_pools_for_one_gpu(gpu: Gpu) -> None:
    with notebook(OTHER, gpu.uuid) as other:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == gpu.uuid
        with raises(PlacementError, f"process {other.pid} of "):
            gpupool.start(gpus=gpu.uuid)
        with gpupool.start(gpus=gpu.uuid, backend="gloo", force=True) as pool:
            assert pool.run("torch.ones(1, device=device).item()")[0] == 1.0
        other.kill()


def test_a_script_for_torchrun_uses_its_gpu_by_its_local_rank(gpu: Gpu) -> None:
    scripts = Path(__file__).parents[1] / "spmd" / "scripts"
    with gpupool.start(n=1, gpus=gpu.uuid) as pool:
        for name in ("ddp_tutorial", "explicit_init"):
            pool.run((scripts / f"{name}.py").read_text(), timeout_s=120)
            assert pool.run(SUM)[0] == 1.0
        assert pool.run("dist.init_process_group('nccl'); dist.get_backend_config()")[0] == (
            "cpu:gloo,cuda:nccl"
        )
