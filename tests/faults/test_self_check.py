"""Where the facts about gloo do not hold the pool says so, and replaces ranks it cannot free.

`TORCH_GLOO_LAZY_INIT=1` is a real cause: see `test_facts.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import gpupool
from gpupool import Pool
from gpupool.pool import session
from tests.faults.invariants import Faulty

LAZY = "TORCH_GLOO_LAZY_INIT"


@pytest.fixture
def lazy_pool() -> Iterator[Pool]:
    session.stop()
    os.environ[LAZY] = "1"
    with gpupool.start(n=3, device="cpu") as pool:
        pool.run("kept = 10 + rank")
        yield pool


def test_ranks_that_cannot_be_freed_are_replaced_and_it_is_said(lazy_pool: Pool) -> None:
    assert "of its 2 gloo connections were found; TORCH_GLOO_LAZY_INIT is set" in (
        lazy_pool.group.stuck
    )
    faulty = Faulty(lazy_pool, {})
    cell = "sub = dist.new_group([0, 1])\nif rank == 1: 1 / 0\nif rank == 0: dist.barrier(sub)"
    error = faulty.fails(cell)
    assert str(error).startswith("rank 1: ZeroDivisionError")
    lazy_pool.wait_until_usable()
    lost = [rank for rank in range(3) if faulty.pid(rank) != faulty.pids[rank]]
    if lost:  # gloo may have been just about to connect
        assert "connections were found; TORCH_GLOO_LAZY_INIT is set" in faulty.notices[0]
    faulty.check(lost)
