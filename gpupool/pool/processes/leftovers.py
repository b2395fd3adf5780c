"""Processes of pools whose notebook and agent are both gone. Runs on the client.

The agent ends everything with its notebook, and the kernel ends its children with the agent. What
can be left when both are killed at one moment are processes that those children had started.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpupool.core.machine.locks import hold_folder
from gpupool.core.machine.private_folders import temporary_places
from gpupool.core.machine.processes import ProcessId, command_of, started_with
from gpupool.core.wire.agent import AGENT, CLIENT, CONTROLLER, FORK_SERVER, RANK

_TIMEOUT_S = 1.0  # a process in state D may not end at all
_MAX_STATE_BYTES = 2**20  # of thousands of ranks
_NAME = re.compile(f"{AGENT}|{CLIENT}|{CONTROLLER}|{FORK_SERVER}|{RANK}[0-9]{{1,6}}")


def reap() -> str:
    """End what crashed pools of this user have left on this machine; names it, or gives "".

    A process is known by its pid and the time it started, or by its pool's folder in its first
    environment: another one that has its pid by now is left alone.
    """
    ended: dict[ProcessId, str] = {}
    for folder, known in _abandoned():
        deadline = time.monotonic() + _TIMEOUT_S
        while (left := _left(folder, known)) and time.monotonic() < deadline:
            for process in left:
                process.kill()
            ended |= left
            time.sleep(0.01)
        if not left:
            shutil.rmtree(folder, ignore_errors=True)
    listed = ", ".join(f"{name} (pid {process.pid})" for process, name in ended.items())
    return f"ended what an earlier pool had left in a crash: {listed}." if ended else ""


def _left(folder: Path, known: Mapping[ProcessId, str]) -> dict[ProcessId, str]:
    """What lives of the pool that had this folder, with the name or command of each."""
    commands = {one: command_of(one.pid) for one in started_with("GPUPOOL_FOLDER", str(folder))}
    return commands | {one: name for one, name in known.items() if one.is_alive}


def _abandoned() -> Iterator[tuple[Path, dict[ProcessId, str]]]:
    """The folders of pools whose notebook and agent have ended, and the processes they had."""
    for folder in (one for place in temporary_places() for one in place.glob("gpupool-*")):
        processes = _state(folder)
        if not processes or os.environ.get("GPUPOOL_FOLDER") == str(folder):
            continue  # a cell of that pool has started the script that this is
        # a notebook that lives ends itself what its agent has left
        owners = processes.pop(AGENT), processes.pop(CLIENT)
        if not any(owner.is_alive for owner in owners) and not _in_use(folder):
            yield folder, {process: name for name, process in processes.items()}


def _in_use(folder: Path) -> bool:
    """Whether an agent holds it that cannot be seen from here, in another container."""
    descriptor = hold_folder(folder)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def _state(folder: Path) -> dict[str, ProcessId] | None:
    """What an agent has last written about its processes; None for anything else of that name.

    An agent's folder is its user's alone (mode 0700).
    """
    try:
        found = folder.lstat()
        is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
        if not is_private or found.st_uid != os.getuid():
            return None
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(folder / "processes.json", flags), "rb") as file:
            state = json.loads(file.read(_MAX_STATE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(state, dict) or not {AGENT, CLIENT} <= state.keys():
        return None
    if not all(_NAME.fullmatch(name) and _is_process(of) for name, of in state.items()):
        return None
    return {name: ProcessId(*numbers) for name, numbers in state.items()}


def _is_process(numbers: object) -> bool:
    """Whether it is a pid, and a time in ticks since boot."""
    if not isinstance(numbers, list) or [type(number) for number in numbers] != [int, int]:
        return False
    pid, started = numbers
    return bool(0 < pid < 2**31 and 0 <= started < 2**63)
