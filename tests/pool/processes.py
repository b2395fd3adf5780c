"""Looking at the processes of a pool, and scripts that play a notebook of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from gpupool import Pool

PATIENCE, LONG_S = 10, 60.0  # so much slower may a machine be that others use too, up to a minute


def until(holds: Callable[[], bool], seconds: float, what: str = "it") -> None:
    """Wait for something to become true; fails after a while.

    Args:
        seconds: within which it is meant to happen, where nothing else runs.
    """
    limit_s = max(seconds, min(PATIENCE * seconds, LONG_S))
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s:g} s"
        time.sleep(0.02)


def gone(*pids: int) -> bool:
    """Whether none of these processes runs; an unreaped zombie does not."""

    def runs(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return not any(map(runs, pids))


def engine_pid(pool: Pool, rank: int) -> int:
    """The process of a rank."""
    return pool.status().pids[rank]


def folder_of(pool: Pool) -> Path:
    """The pool's private folder."""
    return pool.new_file("x").parent


def family(pool: Pool) -> dict[str, psutil.Process]:
    """All processes of a pool: "agent", "fork server", "controller", "rank 0", their children."""
    pids = pool.status().pids
    agent = psutil.Process(pids[0]).parent()
    assert agent is not None
    found = {"agent": agent}
    names = {"gpupool:forks": "fork server", "gpupool:control": "controller"}
    names |= {f"gpupool:rank{rank}": f"rank {rank}" for rank in pids}
    for process in agent.children(recursive=True):
        own = names.get(process.name()) if process.ppid() == agent.pid else None
        found[own or f"{process.name()} {process.pid}"] = process
    return found


def members(pool: Pool) -> list[int]:
    """The pids of what `pool.stop()` ends: all but the agent and its fork server."""
    everyone = family(pool).items()
    return [process.pid for name, process in everyone if name not in ("agent", "fork server")]


def notebook(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python process of its own that runs `script` and can be killed."""
    return subprocess.Popen(
        [sys.executable, "-uc", script, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
