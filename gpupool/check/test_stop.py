"""What a pool leaves: nothing. Tried last. Runs on the client."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import gpupool
from gpupool.check.bench import Bench, Tell


@pytest.mark.timeout(90)
def test_stop(bench: Bench, tell: Tell) -> None:
    """every rank is gone, from its GPU too"""
    if not bench.is_up:
        pytest.skip("there is no pool")
    pids = set(bench.pids().values())
    began = time.monotonic()
    bench.stop()
    seconds = time.monotonic() - began
    alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not alive, f"ranks that still run: {alive}"
    left = [p.pid for gpu in gpupool.gpus() for p in gpu.processes if p.pid in pids]
    assert not left, f"processes that the driver still shows: {left}"
    tell(f"{seconds:.1f} s")
