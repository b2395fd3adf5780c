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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpupool.core.machine.locks import hold_folder
from gpupool.core.machine.private_folders import temporary_places
from gpupool.core.machine.processes import ProcessId, command_of, started_with

_REAP_TIMEOUT_S = 5.0
_MAX_STATE_BYTES = 2**20  # of thousands of ranks
_NAME = re.compile(r"agent|client|controller|fork server|rank [0-9]{1,6}")


@dataclass(frozen=True, slots=True)
class Leftover:
    """One process; `name` is what its pool called it, or else its command."""

    process: ProcessId
    name: str
    folder: Path

    @property
    def since(self) -> str:
        """When it began, such as "21 November 14:03"."""
        return time.strftime("%d %B %H:%M", time.localtime(self.process.start_time))

    def __str__(self) -> str:
        return f"{self.name}, pid {self.process.pid}, since {self.since}"


class Leftovers(tuple[Leftover, ...]):
    """What is left of earlier pools of this user on this machine; `reap` ends it."""

    __slots__ = ()

    def reap(self) -> None:
        """Kill these very processes, and remove the folders of their pools.

        A process is known by its pid and the time it started: another one that has its pid by now
        is left alone.
        """
        for leftover in self:
            leftover.process.kill()
        deadline = time.monotonic() + _REAP_TIMEOUT_S
        while any(one.process.is_alive for one in self) and time.monotonic() < deadline:
            time.sleep(0.01)
        for folder in {one.folder for one in self if not one.process.is_alive}:
            shutil.rmtree(folder, ignore_errors=True)

    def __repr__(self) -> str:
        if not self:
            return "Nothing is left of earlier pools."
        plural = "es" if len(self) > 1 else ""
        runs = "run" if len(self) > 1 else "runs"
        lines = [f"{len(self)} process{plural} of earlier pools still {runs}:"]
        return "\n".join([*lines, *(f"  {leftover}" for leftover in self)])


def leftovers() -> Leftovers:
    """Processes that pools of this user have left on this machine; nothing is done to them.

    Folders of ended pools of which no process is left are removed.
    """
    found: list[Leftover] = []
    for folder, state in _abandoned():
        alive = [
            Leftover(process, name, folder) for name, process in state.items() if process.is_alive
        ]
        known = {one.process.pid for one in alive}
        alive += [
            Leftover(process, command_of(process.pid), folder)
            for process in started_with("GPUPOOL_FOLDER", str(folder))
            if process.pid not in known
        ]
        if not alive:
            shutil.rmtree(folder, ignore_errors=True)
        found += alive
    return Leftovers(found)


def _abandoned() -> Iterator[tuple[Path, dict[str, ProcessId]]]:
    """The folders of pools whose agent has ended, and the processes it last had."""
    for folder in (one for place in temporary_places() for one in place.glob("gpupool-*")):
        processes = _state(folder)
        if processes and not processes.pop("agent").is_alive and not _in_use(folder):
            del processes["client"]
            yield folder, processes


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
    if not isinstance(state, dict) or not {"agent", "client"} <= state.keys():
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
