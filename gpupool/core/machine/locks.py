"""One pool at a time on a GPU, among all users of this machine. Runs in the starter.

A lock is an flock(2) on a file named after the device: the kernel releases it when its holder
ends, however that comes. Every user may write to the file, so nothing in it is ever read: the
kernel says which process holds it (/proc/locks), and whose that is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

# FHS: "lock files for devices and other resources shared by multiple applications"
_PLACES = (Path("/run/lock"), Path("/tmp"))  # noqa: S108 - the same for every user, on purpose

STARTER = "gpupool:starter"  # the name of the process that holds locks for its notebook
ENDING_STARTER = "gpupool:ending"  # the same when that has ended, until its ranks have too
_MAX_LOCKS_BYTES = 2**20  # of /proc/locks, which other users may fill
_NUM_TRIES = 10

ENDING = ", which is ending"  # behind the owner of a lock: the driver takes the memory back


def lock_folder() -> Path:
    """The folder that all users of this machine may write lock files to."""
    for place in _PLACES:
        everybodys = stat.S_ISVTX | stat.S_IWOTH
        # in a container its file system may be read-only all the same
        if os.access(place, os.W_OK) and place.stat().st_mode & everybodys == everybodys:
            return place
    return _PLACES[-1]


class DeviceLocks:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}

    def take(
        self, devices: Sequence[str], number: int, force: bool = False
    ) -> tuple[list[str], dict[str, str]]:
        """Lock the first `number` of `devices` that are free; none at all if there are too few.

        Gives these, and the owner of each that another process has locked; `force` counts those as
        free.
        """
        taken: list[str] = []
        others: dict[str, str] = {}
        for device in devices:
            if len(taken) == number:
                break
            if other := self._lock(device):
                others[device] = other
            if force or not other:
                taken.append(device)
        if len(taken) < number:
            self.release()
            return [], others
        return taken, others

    def release(self) -> None:
        for descriptor in self._held.values():
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # to close it is not enough: a fork may have it
            os.close(descriptor)
        self._held.clear()

    def _lock(self, device: str) -> str:
        """Lock one device; returns its owner instead if that is another process."""
        if device in self._held:
            return ""
        name = re.sub(r"[^A-Za-z0-9.-]", "-", device)
        try:
            descriptor = _open(self._folder / f"gpupool-{name}.lock")
        except OSError as error:  # somebody has put something else there
            return f"somebody ({error})"
        for _ in range(_NUM_TRIES):
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._held[device] = descriptor
                return ""
            if owner := _owner(descriptor):
                break
            time.sleep(0.1)  # it may have ended just now
        os.close(descriptor)
        return owner or "a process that cannot be seen from here"


def _open(path: Path) -> int:
    """Open a lock file, for the first time or one that another user has made.

    The folder is everybody's: a link set there must not lead us to write elsewhere, and a lease
    (fcntl(2)) on the file must not keep us waiting.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        # The umask took that away; another user has to lock it too.
        os.fchmod(descriptor, 0o666)  # nosec B103 # nothing in it is trusted
        return descriptor


def _owner(descriptor: int) -> str:
    """Who holds a lock, as in "process 4711 of ada": the notebook for its starter; "": not seen.

    The kernel leaves a lock out if one above it goes while the list is read.
    """
    file = os.fstat(descriptor)
    name = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    with open("/proc/locks", "rb") as locks:
        rows = [line.split() for line in locks.read(_MAX_LOCKS_BYTES).decode().splitlines()]
    # "1: FLOCK  ADVISORY  WRITE 4711 fe:00:2280340 0 EOF"; who only waits has "->" before FLOCK
    pids = (int(row[4]) for row in rows if row[1:2] == ["FLOCK"] and name in row[5:6])
    with contextlib.suppress(StopIteration, psutil.Error):  # it ends just now, or is hidden
        holder = psutil.Process(next(pids))
        pid = holder.ppid() if holder.name() == STARTER else holder.pid
        is_ending = holder.name() == ENDING_STARTER
        return f"process {pid} of {holder.username()}{ENDING if is_ending else ''}"
    return ""
