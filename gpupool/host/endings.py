"""What a process left behind that shows why it ended. Runs in the agent."""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path

from gpupool.core.machine.processes import lack_of_processes
from gpupool.host.memory import OutOfMemoryWatch

_LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 1 << 16  # a log may be larger than memory, and a line of it too
_MAX_LOG_BYTES, _KEPT_LOG_BYTES = 16 << 20, 1 << 20
_CRASH = "Fatal Python error"  # faulthandler's first line; the innermost frames follow it
_THROWN = "  what():"  # what C++ says before it of an exception that nobody has caught
_GLOO_CHECK = re.compile(r"what\(\):.*enforce fail.*gloo/")
_SAYS_WHY = re.compile(r'what\(\):|^  File "', re.MULTILINE)  # the latter is a frame of Python's
_DDP_SETUP = " in _ddp_init_helper"
_RUNS_CELLS = re.compile(
    r'  File ".*/(IPython/core/interactiveshell|gpupool/engine/(execute|entry))\.py", line \d+ in '
)
_CELL = re.compile(  # a file that is none
    r'^  File "(?:[^"]*/ipykernel_\d+/\d+\.py|<ipython-input-\d+-\w+>)"(?=, line)'
)


def cause_of_end(status: int, folder: Path, tail: str, memory: OutOfMemoryWatch) -> str:
    """What the exit status does not say: that memory or disk space ran out, say; else "".

    Args:
        folder: where the log is.
        tail: the end of the log.
    """
    if status == -signal.SIGKILL:
        return memory.reason()
    said_full = not tail or os.strerror(errno.ENOSPC) in tail  # or not even a log was written
    if said_full and _is_full(folder):
        return f"No space left on device: {folder}"
    if status == -signal.SIGABRT and _GLOO_CHECK.search(tail):
        return (
            "gloo ends a process that is sent what it does not expect: ranks were in one "
            "collective with tensors of different sizes, or, less likely, another user sent it"
        )
    # What gloo has said is mostly lost with the process, which read its own stderr.
    if status == -signal.SIGABRT and _CRASH in tail and not _SAYS_WHY.search(tail):
        return (
            "a thread of C++ code has ended it, as gloo's do where ranks are in one collective "
            "with tensors of different sizes"
        )
    if status == -signal.SIGSEGV and _DDP_SETUP in tail:
        return "torch 2.15 ends so where TORCH_DISTRIBUTED_DEBUG is DETAIL; INFO works"
    return lack_of_processes(tail, status == -signal.SIGABRT) if status else ""


def log_tail(log: Path, start: int) -> str:
    """The end of a log; of a crash report the beginning, where the user's own lines are.

    Args:
        start: bytes of the log that are not looked at.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = start if start <= size else 0  # it was shortened since
            file.seek(max(begin, size - _LOG_TAIL_BYTES))
            lines = file.read(_LOG_TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:  # the log is gone with its folder; the death still has to be reported
        return ""
    crashes = [i for i, line in enumerate(lines) if line.startswith(_CRASH)]
    if crashes:
        thrown = [line for line in lines[: crashes[-1]] if line.startswith(_THROWN)]
        report = [*thrown[-1:], *_crash(lines[crashes[-1] :])]
        return "\n".join(report[:_LOG_TAIL_LINES])
    return "\n".join(lines[-_LOG_TAIL_LINES:])


def shorten(log: Path) -> None:
    """Keep the end of a log that has become long; its process continues appending to it."""
    with log.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size > _MAX_LOG_BYTES:
            file.seek(size - _KEPT_LOG_BYTES)
            end = file.read(_KEPT_LOG_BYTES)
            file.truncate(0)
            file.write(b"(the beginning was too long)\n" + end)


def _crash(report: list[str]) -> list[str]:
    """A crash report without the frames that have led to the user's code, and what follows them."""
    for number, line in enumerate(report):
        if _RUNS_CELLS.match(line) and report[number - 1].startswith("  File "):
            report = report[:number]
            break
    return [_CELL.sub("  Cell", line) for line in report]


def _is_full(folder: Path) -> bool:
    try:
        room = os.statvfs(folder)
        return room.f_bavail == 0 or (room.f_files > 0 and room.f_favail == 0)
    except OSError:  # the folder is gone: something else is wrong
        return False
