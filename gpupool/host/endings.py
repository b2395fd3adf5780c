"""What a process left behind that shows why it ended. Runs in the starter."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

from gpupool.core.machine import limits

_LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 1 << 16  # a log may be larger than memory, and a line of it too
_CRASH = "Fatal Python error"  # faulthandler's first line; the innermost frames follow it
_THROWN = "  what():"  # what C++ says before it of an exception that nobody has caught
_GLOO_CHECK = re.compile(r"what\(\):.*enforce fail.*gloo/")
_SAYS_WHY = re.compile(r'what\(\):|^  File "', re.MULTILINE)  # the latter is a frame of Python's


def cause_of_end(status: int, log: Path, tail: str, memory: OutOfMemoryWatch) -> str:
    """What the exit status does not say; "" if nothing is known."""
    if status == -signal.SIGKILL:
        return memory.reason()
    if not tail and log.parent.is_dir() and shutil.disk_usage(log.parent).free == 0:
        return f"No space left on device: {log.parent}"
    # What gloo has said is mostly lost with the process, which read its own stderr.
    said_nothing = _CRASH in tail and not _SAYS_WHY.search(tail)
    if status == -signal.SIGABRT and (said_nothing or _GLOO_CHECK.search(tail)):
        return (
            "a thread of C++ code has ended it, as gloo's do where ranks are in one collective "
            "with tensors of different sizes"
        )
    return ""


def log_tail(log: Path, start: int) -> str:
    """The end of a log, from `start` on; of a crash report the beginning, where the user's own
    lines are."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _LOG_TAIL_BYTES))
            lines = file.read(_LOG_TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:  # the log is gone with its folder; the death still has to be reported
        return ""
    crashes = [i for i, line in enumerate(lines) if line.startswith(_CRASH)]
    if not crashes:
        return "\n".join(lines[-_LOG_TAIL_LINES:])
    thrown = [line for line in lines[: crashes[-1]] if line.startswith(_THROWN)]
    return "\n".join([*thrown[-1:], *lines[crashes[-1] :]][:_LOG_TAIL_LINES])


class OutOfMemoryWatch:
    """Whether the kernel ended a process because memory ran out: SIGKILL does not say who sent it.

    It counts its out-of-memory kills of each cgroup (the container, the job): each that is new
    explains one death.
    """

    def __init__(self, root: Path = limits.ROOT) -> None:
        self._root = root
        self.renew()

    def renew(self) -> None:
        """Forget the kills until now: they are of others."""
        self._seen = self._count()

    def reason(self) -> str:
        """Why a process was killed, if that was the kernel; "" if not."""
        if self._count() <= self._seen:
            return ""
        self._seen += 1
        limit = limits.memory_limit(self._root)
        why = f"the memory limit of its cgroup ({limit / 2**30:.1f} GiB) was reached"
        return f"out of host memory: {why if limit else 'the kernel has ended it for that'}"

    def _count(self) -> int:
        for folder in limits.folders("memory", self._root):
            # memory.events is cgroup v2 (.local: without the groups below it), oom_control v1
            for name in ("memory.events.local", "memory.events", "memory.oom_control"):
                words = limits.text(folder / name).split()
                if "oom_kill" in words:
                    return int(words[words.index("oom_kill") + 1])
        return 0
