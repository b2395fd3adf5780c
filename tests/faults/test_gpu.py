"""Faults of a GPU that `python -m gpupool check` does not try."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import gpupool
from gpupool import Pool
from gpupool.core.machine.gpus import discover
from gpupool.pool import session
from tests.faults.invariants import DEADLINE_S, Faulty

gpu = pytest.mark.gpu

SUM = "x = torch.ones(1, device=device); dist.all_reduce(x); x.item()"
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
    with gpupool.start(n=1, gpus=discover().usable[0].uuid) as pool:
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


@gpu
def test_a_group_is_formed_again_after_an_abort_of_nccl(faulty_gpu: Faulty) -> None:
    """A rank that catches the interrupt is aborted in a moment: no kernel runs, and it stays."""
    pool, pid = faulty_gpu.pool, faulty_gpu.pid(0)
    faulty_gpu.stopped(f"dist.all_reduce(torch.ones(1, device=device))\n{CATCHES}", after_s=1.0)
    assert dict(pool.run(f"{SUM}, kept", timeout_s=DEADLINE_S)) == {0: (1.0, 10)}
    assert pool.generation > faulty_gpu.generation
    assert faulty_gpu.pid(0) == pid
