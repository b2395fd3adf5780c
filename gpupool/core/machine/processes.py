"""The processes of this machine: how they are started, named and found. Runs anywhere."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import gpupool

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def command_for(module: str, python: str = sys.executable) -> list[str]:
    """How to start `main` of a module of this package, wherever that was imported from.

    Files of the present folder hide none of the library's, as they would with `python -m`. Another
    `python`, that of another host say, takes its own gpupool if it has one.
    """
    found = Path(__file__).parents[3]
    first = "0" if python == sys.executable else "len(sys.path)"
    code = (
        f"import sys; found = {str(found)!r}; found in sys.path or sys.path.insert({first}, found);"
        f" from {module} import main; main()"
    )
    return [python, "-P", "-c", code]


def versions() -> dict[str, str]:
    """The versions of Python, gpupool and torch; without torch where it is not installed."""
    from importlib import metadata  # 20 ms, of which `%load_ext` needs nothing

    found = {"python": ".".join(map(str, sys.version_info[:2])), "gpupool": gpupool.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["torch"] = metadata.version("torch")
    return found


def state_of(pid: int) -> str:
    """What a process does: "R" runs, "S" sleeps, "D" waits in the kernel, "T" is stopped, "t" is
    held by a debugger, "Z" has ended; "" if it is gone (proc(5), field 3)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]  # the name before it may hold anything


def set_process_name(name: str) -> None:
    """What `top`, `nvidia-smi` and psutil call this process from now on; 15 characters of it."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, also if it has already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def dying_with_us(command: Sequence[str]) -> list[str]:
    """`command`, so that it gets SIGHUP when the thread that starts it ends, as with us.

    Of SIGTERM and the end of its stdin at once salloc (22.05) makes an endless loop.
    """
    code = (
        "import ctypes, os, signal, sys; "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # a notebook under nohup ignores it
        f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGHUP)}); "
        f"os.getppid() == {os.getpid()} and os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-I", "-S", "-c", code, *command]
