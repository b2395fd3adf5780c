"""A pool of three that faults are done to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpupool import Pool
from gpupool.pool.calls import freeing
from tests.faults.invariants import CANARY, SECRET, SUM, Faulty, Footprint, footprint

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
    before = {pid: _first.setdefault((file, pid), footprint(pid)) for pid in pids}
    return Faulty(pool3, before, tmp_path)


@pytest.fixture
def short_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRACE_S", "ABORT_S", "AGAIN_S", "WARN_S", "KILL_S"):
        monkeypatch.setattr(freeing, name, getattr(freeing, name) / 4)
