"""Processes that cannot be mistaken for others: a pid and when it started. Runs anywhere, on Linux.

A pid alone is used again sooner or later. Facts are from proc(5).
"""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpupool.core.machine.limits import has_met_process_limit

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_NO_MORE = ("can't start new thread", os.strerror(errno.EAGAIN))  # of Python; of the C library


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of this machine. `started` counts clock ticks since boot (proc(5), field 22)."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The process that has this pid now.

        Raises:
            ProcessLookupError: there is none.
        """
        return cls(pid, int(_stat(pid)[19]))

    @property
    def start_time(self) -> float:
        """When it started, in seconds since the epoch."""
        boot = next(
            float(line.split()[1])
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime")
        )
        return boot + self.started / os.sysconf("SC_CLK_TCK")


def command_for(module: str) -> list[str]:
    """How to start `main` of a module of this package, wherever that was imported from.

    Files of the present folder hide none of the library's, as they would with `python -m`.
    """
    found = Path(__file__).parents[3]
    code = (
        f"import sys; found = {str(found)!r}; found in sys.path or sys.path.insert(0, found); "
        f"from {module} import main; main()"
    )
    return [sys.executable, "-P", "-c", code]


def lack_of_processes(said: str, aborted: bool = False) -> str:
    """That no more processes may be started, if an error means that; else "".

    `aborted`: a process has, as C++ does that gets no thread, and its words may be lost.
    """
    is_so = any(words in said for words in _NO_MORE)
    if not is_so and not (aborted and has_met_process_limit()):
        return ""
    return (
        "no more processes or threads may be started: see `ulimit -u`, and pids.max of containers"
    )


def children(pid: int) -> list[int]:
    """The pids of the children a process has now."""
    return [child for child in all_pids() if parent_of(child) == pid]


def all_pids() -> Iterator[int]:
    """Every process of this machine that can be seen from here."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def command_of(pid: int) -> str:
    """The short name of a process's command, without control characters; "?" if it has ended."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "?"
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def user_of(pid: int) -> str:
    """The name of the real user of a process; the number of one without a name.

    A process of another one's that runs a program of root's, as `su`, is still that one's.

    Raises:
        OSError: it has ended, or cannot be seen.
    """
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    uid = next(int(line.split()[1]) for line in lines if line.startswith("Uid:"))
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # as in a container
        return str(uid)


def state_of(pid: int) -> str:
    """What a process does: "R" runs, "S" sleeps, "D" waits in the kernel, "T" is stopped, "t" is
    held by a debugger, "Z" has ended; "" if it is gone (proc(5), field 3)."""
    try:
        return _stat(pid)[0]
    except ProcessLookupError:
        return ""


def process_name(name: str) -> str:
    """What the process that a pool calls `name` is called by the kernel.

    >>> process_name("rank 1"), process_name("controller")
    ('gpupool:rank1', 'gpupool:control')
    """
    return f"gpupool:{name.replace(' ', '')}"[:15]


def set_process_name(name: str) -> None:
    """What `top`, `nvidia-smi` and psutil call this process from now on; 15 characters at most."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, also if it has already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def parent_of(pid: int) -> int | None:
    """The pid of a process's parent; None if it has ended."""
    try:
        return int(_stat(pid)[1])
    except ProcessLookupError:
        return None


def _stat(pid: int) -> list[str]:
    """State, parent pid, ... of a process: the fields after its name, which may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(pid) from None
    return text.rpartition(")")[2].split()
