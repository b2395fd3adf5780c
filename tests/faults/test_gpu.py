"""Faults on a machine with an NVIDIA GPU, one is enough; some have the same meaning on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import gpupool
from gpupool import Pool
from gpupool.core.machine.gpus import visible_gpus
from gpupool.pool import session
from tests.faults.invariants import DEADLINE_S, Faulty, within

gpu = pytest.mark.gpu

SUM = "x = torch.ones(1, device=device); dist.all_reduce(x); x.item()"
FREE = "torch.cuda.mem_get_info()[0] / 2**20"
# Not `while True: pass`: Python 3.11 and 3.12 raise the interrupt in it behind the `except`.
CATCHES = """
import time
try:
    while True: time.sleep(0.01)
except KeyboardInterrupt: time.sleep(5)
"""
# A kernel that runs for an hour; it knows nothing of Python, and the main thread waits for it.
STUCK = "torch.cuda._sleep(int(3600 * 2e9)); dist.all_reduce(torch.ones(1, device=device))"


@pytest.fixture(scope="module")
def gpu_pool() -> Iterator[Pool]:
    """One rank, with a GPU: its group is NCCL's."""
    session.stop()
    with gpupool.start(n=1, gpus=visible_gpus()[0].uuid) as pool:
        yield pool


@pytest.fixture
def faulty_gpu(gpu_pool: Pool, tmp_path: Path) -> Faulty:
    gpu_pool.run("kept = 10 + rank")
    return Faulty(gpu_pool, {}, tmp_path)


@gpu
def test_a_group_of_one_is_aborted_while_a_kernel_runs(faulty_gpu: Faulty) -> None:
    """The rank is replaced: NCCL's abort waits for its kernel, and that for one nobody can end."""
    pid = faulty_gpu.pid(0)
    error = faulty_gpu.stopped(f"{STUCK}\ntorch.cuda.synchronize()", after_s=1.0)
    assert error.first.rank == 0
    assert dict(faulty_gpu.pool.run(SUM, timeout_s=DEADLINE_S)) == {0: 1.0}
    assert faulty_gpu.pid(0) != pid


def formed_again_after_an_abort(faulty: Faulty) -> None:
    """A rank that catches the interrupt is aborted in a moment: no kernel runs, and it stays."""
    pool, generation, pids = faulty.pool, faulty.pool.generation, faulty.pool.status().pids
    faulty.stopped(f"dist.all_reduce(torch.ones(1, device=device))\n{CATCHES}", after_s=1.0)
    within(pool, SUM, dict.fromkeys(pids, float(len(pids))))
    within(pool, "kept", {rank: 10 + rank for rank in pids})
    assert pool.generation > generation
    assert pool.status().pids == pids


@gpu
def test_a_group_is_formed_again_after_an_abort_of_nccl(faulty_gpu: Faulty) -> None:
    formed_again_after_an_abort(faulty_gpu)


def test_a_group_is_formed_again_after_an_abort_of_gloo(faulty: Faulty) -> None:
    formed_again_after_an_abort(faulty)


@gpu
def test_out_of_memory_is_told_and_the_rank_stays(faulty_gpu: Faulty) -> None:
    before = faulty_gpu.pool.run(FREE)[0]
    error = faulty_gpu.fails(
        "hog = [torch.ones(2**28, device=device)]\n"
        "while True: hog.append(torch.ones(2**28, device=device))"
    )
    assert "CUDA out of memory" in str(error)
    faulty_gpu.pool.run("del hog; import gc; gc.collect(); torch.cuda.empty_cache()")
    assert faulty_gpu.pool.run(FREE)[0] > before - 600
    assert dict(faulty_gpu.pool.run(SUM, timeout_s=DEADLINE_S)) == {0: 1.0}
    assert dict(faulty_gpu.pool.run("kept")) == {0: 10}


@gpu
def test_memory_of_a_function_that_ran_out_of_it_is_free_again(faulty_gpu: Faulty) -> None:
    before = faulty_gpu.pool.run(FREE)[0]

    def fill() -> None:
        import torch

        local = [torch.ones(2**28, device="cuda")]
        while True:
            local.append(torch.ones(2**28, device="cuda"))

    with pytest.raises(gpupool.SpmdError, match="CUDA out of memory"):
        faulty_gpu.pool.run(fill, timeout_s=DEADLINE_S)
    assert faulty_gpu.pool.run(FREE)[0] > before - 600


@gpu
def test_a_device_side_assert_costs_that_rank_alone(faulty_gpu: Faulty) -> None:
    pid = faulty_gpu.pid(0)
    error = faulty_gpu.fails(
        "torch.zeros(2, device=device)[torch.tensor([5], device=device)]\ntorch.cuda.synchronize()"
    )
    assert "GPU context of this rank is lost" in error.first.hint
    assert dict(faulty_gpu.pool.run(SUM, timeout_s=DEADLINE_S)) == {0: 1.0}
    assert faulty_gpu.pid(0) != pid
    assert dict(faulty_gpu.pool.run("globals().get('kept')")) == {0: None}
