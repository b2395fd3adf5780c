"""Pools and faults on a machine with an NVIDIA GPU; one is enough. More of it: gpupool/check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import gpupool
from gpupool import TrainingOptions
from gpupool.core.machine.gpus import discover
from gpupool.core.machine.topology import Gpu
from gpupool.pool import session
from tests.faults.invariants import DEADLINE_S, Faulty
from tests.support.trainings import network, samples

pytestmark = pytest.mark.gpu

SUM = "x = torch.ones(1, device=device); dist.all_reduce(x); x.item()"


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """The first GPU, which no pool of ours uses before the test nor after it."""
    session.stop()
    yield discover().usable[0]
    session.stop()


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


def test_a_script_for_torchrun_uses_its_gpu_by_its_local_rank(gpu: Gpu) -> None:
    scripts = Path(__file__).parents[1] / "spmd" / "scripts"
    with gpupool.start(n=1, gpus=gpu.uuid) as pool:
        for name in ("ddp_tutorial", "explicit_init"):
            pool.run((scripts / f"{name}.py").read_text(), timeout_s=120)
            assert pool.run(SUM)[0] == 1.0
        assert pool.run("dist.init_process_group('nccl'); dist.get_backend_config()")[0] == (
            "cpu:gloo,cuda:nccl"
        )


# Not `while True: pass`: Python 3.11 and 3.12 raise the interrupt in it behind the `except`.
CATCHES = """
import time
try:
    while True: time.sleep(0.01)
except KeyboardInterrupt: time.sleep(5)
"""
# A kernel that runs for an hour; it knows nothing of Python, and the main thread waits for it.
STUCK = "torch.cuda._sleep(int(3600 * 2e9)); dist.all_reduce(torch.ones(1, device=device))"


@pytest.fixture
def faulty(gpu: Gpu, tmp_path: Path) -> Iterator[Faulty]:
    """One rank, with a GPU: its group is NCCL's."""
    with gpupool.start(n=1, gpus=gpu.uuid) as pool:
        pool.run("kept = 10 + rank")
        yield Faulty(pool, {}, tmp_path)


def test_a_group_of_one_is_aborted_while_a_kernel_runs(faulty: Faulty) -> None:
    """The rank is replaced: NCCL's abort waits for its kernel, and that for one nobody can end."""
    pid = faulty.pid(0)
    error = faulty.stopped(f"{STUCK}\ntorch.cuda.synchronize()", after_s=1.0)
    assert error.first.rank == 0
    assert dict(faulty.pool.run(SUM, timeout_s=DEADLINE_S)) == {0: 1.0}
    assert faulty.pid(0) != pid


def test_a_group_is_formed_again_after_an_abort_of_nccl(faulty: Faulty) -> None:
    """A rank that catches the interrupt is aborted in a moment: no kernel runs, and it stays."""
    pool, pid = faulty.pool, faulty.pid(0)
    faulty.stopped(f"dist.all_reduce(torch.ones(1, device=device))\n{CATCHES}", after_s=1.0)
    assert dict(pool.run(f"{SUM}, kept", timeout_s=DEADLINE_S)) == {0: (1.0, 10)}
    assert pool.generation > faulty.generation
    assert faulty.pid(0) == pid
