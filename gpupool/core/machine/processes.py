"""The processes of this machine: how they are started, named and found. Runs anywhere."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
from pathlib import Path

import psutil

from gpupool.core.machine.limits import has_met_process_limit

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_NO_MORE = ("can't start new thread", os.strerror(errno.EAGAIN))  # of Python; of the C library


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
    return [child.pid for child in psutil.Process(pid).children()]


def this_user() -> str:
    """The name of this process's user; the number of one without a name, as in a container."""
    return str(psutil.Process().username())


def state_of(pid: int) -> str:
    """What a process does: "R" runs, "S" sleeps, "D" waits in the kernel, "T" is stopped, "t" is
    held by a debugger, "Z" has ended; "" if it is gone (proc(5), field 3)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]  # the name before it may hold anything


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
