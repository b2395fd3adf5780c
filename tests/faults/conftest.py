"""A pool of three that faults are done to."""

from __future__ import annotations

import os

import pytest

import gpupool
from gpupool.pool import session
from tests.faults.invariants import CANARY, SECRET, SUM, Faulty, Footprint

# of each process, when a file of tests first saw it: other files use ours, too
_first: dict[tuple[str, int], Footprint] = {}


@pytest.fixture
def faulty(request: pytest.FixtureRequest) -> Faulty:
    """Three CPU ranks, each with a variable `kept` and a secret."""
    os.environ[SECRET] = CANARY
    pool = session.find()
    if pool is None or pool.world_size != 3 or pool.status().state in ("broken", "stopped"):
        session.stop()
        pool = gpupool.start(n=3, device="cpu")
        pool.propagate_env(SECRET)
        pool.run(SUM)
    pool.run("kept = 10 + rank")
    pids = [os.getpid(), *pool.status().pids.values()]
    file = request.node.path.name
    before = {pid: _first.setdefault((file, pid), Footprint.of(pid)) for pid in pids}
    return Faulty(pool, before)
