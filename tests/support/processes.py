"""Looking at the processes of a pool, and scripts that play a notebook of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from gpupool import Pool

PATIENCE, LONG_S = 10, 60.0  # so much slower may a machine be that others use too, up to a minute


def until(holds: Callable[[], bool], seconds: float, what: str = "it") -> None:
    """Wait for what is meant to happen within so many seconds, where nothing else runs."""
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
    return pool.status().pids[rank]


def folder_of(pool: Pool) -> Path:
    return pool.engines.new_file("x").parent


def family(pool: Pool) -> dict[str, psutil.Process]:
    """All processes of a pool: "starter", "controller", "rank 0" ..., and their children."""
    pids = pool.status().pids
    starter = psutil.Process(pids[0]).parent()
    assert starter is not None
    found = {"starter": starter}
    names = {"gpupool:control": "controller"}
    names |= {f"gpupool:rank{rank}": f"rank {rank}" for rank in pids}
    for process in starter.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            own = names.get(process.name()) if process.ppid() == starter.pid else None
            found[own or f"{process.name()} {process.pid}"] = process
    return found


def files_in(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file below a folder, with what it holds; some come and go meanwhile."""
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                yield path, path.read_bytes()


def members(pool: Pool) -> list[int]:
    """The pids of what `pool.stop()` ends: all but the starter."""
    return [process.pid for name, process in family(pool).items() if name != "starter"]


def open_files(pid: int | None = None) -> dict[int, str]:
    """The descriptors of a process (of this one), each with what it is."""
    found = {}
    for one in Path(f"/proc/{pid or os.getpid()}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this very look
            found[int(one.name)] = str(one.readlink())
    return found


def is_told(pool: Pool, killed: Mapping[int, int]) -> bool:
    """Whether the pool knows of the end of these processes, rank -> pid."""
    pids, alive = pool.status().pids, pool.engines.alive_ranks()
    return all(rank not in alive or pids.get(rank) != pid for rank, pid in killed.items())


def kill(pool: Pool, *ranks: int) -> None:
    """Kill ranks at once, and wait until the pool knows: what begins before is told of it."""
    pids = {rank: engine_pid(pool, rank) for rank in ranks}
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids.values():
            os.kill(pid, number)
    until(lambda: is_told(pool, pids), 5.0, "its being told")


# ---- moments: so that it does not matter how fast anything is ---------------------------------


def reach(path: Path) -> str:
    """A line of a cell: a rank that comes there leaves a file."""
    return f"open({str(path)!r} + str(rank), 'w').close()"


def reached(path: Path, *ranks: int) -> bool:
    return all(Path(f"{path}{rank}").exists() for rank in ranks)


def press_when(
    holds: Callable[[], bool], waits_in: tuple[str, str] = ("execution.py", "result")
) -> threading.Thread:
    """Press Ctrl-C when this holds and the main thread waits in this function: else it would end
    the tests."""

    def press() -> None:
        until(lambda: holds() and _main_waits(waits_in), 30.0, "the moment to press Ctrl-C")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def _main_waits(waits_in: tuple[str, str]) -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    names = set()
    while frame is not None:
        names.add((Path(frame.f_code.co_filename).name, frame.f_code.co_name))
        frame = frame.f_back
    return {waits_in, ("threading.py", "wait")} <= names


def notebook(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python process of its own that runs `script` and can be killed."""
    return subprocess.Popen(
        [sys.executable, "-uc", script, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
