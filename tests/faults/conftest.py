"""A pool of three that faults are done to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupool import Pool
from tests.faults.invariants import CANARY, SECRET, SUM, Faulty, Footprint

# of each process, when a file of tests first saw it: other files use ours, too
_first: dict[tuple[str, int], Footprint] = {}


@pytest.fixture
def faulty(request: pytest.FixtureRequest, pool3: Pool, tmp_path: Path) -> Faulty:
    """Three CPU ranks, each with a variable `kept` and a secret."""
    os.environ[SECRET] = CANARY
    if SECRET not in pool3.status().env:
        pool3.propagate_env(SECRET)
        pool3.run(SUM)
    pool3.run("kept = 10 + rank")
    pids = [os.getpid(), *pool3.status().pids.values()]
    file = request.node.path.name
    before = {pid: _first.setdefault((file, pid), Footprint.of(pid)) for pid in pids}
    return Faulty(pool3, before, tmp_path)


@pytest.fixture
def short_ladder(pool3: Pool) -> Iterator[None]:
    """Each step against a rank that does not react comes after a quarter of its time."""
    pool3._all_ranks.ladder_scale = 0.25
    yield
    pool3._all_ranks.ladder_scale = 1.0
