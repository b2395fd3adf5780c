"""One pool at a time on a GPU, among all users of this machine. Runs in the agent.

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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import psutil

from gpupool.core.machine.processes import this_user

# FHS: "lock files for devices and other resources shared by multiple applications"
_PLACES = (Path("/run/lock"), Path("/tmp"))  # noqa: S108 - the same for every user, on purpose

AGENT = "gpupool:agent"  # the name of the process that holds locks for its notebook
ENDING_AGENT = "gpupool:ending"  # the same when that has ended, until its ranks have too
_MAX_LOCKS_BYTES = 2**20  # of /proc/locks, which other users may fill
_NUM_LOOKS = 3  # the kernel leaves a lock out if one above it goes while the list is read


class Owner(TypedDict, total=False):
    """Who has locked a device, as far as the kernel knows.

    `is_ending`: its notebook has ended, and the driver takes the memory of the ranks back.
    """

    pid: int
    user: str
    is_ending: bool


def locked_text(others: Mapping[str, Owner], num_gpus: int, number: int) -> str:
    """Why `number` of `num_gpus` GPUs cannot be had: who has them, and what to do."""
    owners: dict[str, list[str]] = {}
    for uuid, owner in others.items():
        who = f"process {owner.get('pid', '?')} of {owner.get('user', '?')}"
        owners.setdefault(who, []).append(uuid)
    listed = "; ".join(f"{', '.join(uuids)} by {who}" for who, uuids in owners.items())
    return too_few_text(f"other pools use {listed}", num_gpus - len(others), num_gpus, number)


def too_few_text(why: str, free: int, num_gpus: int, number: int) -> str:
    """That `free` of `num_gpus` GPUs can be had and not `number`, for which reason, what to do."""
    take = f"`-n {free}` takes those" if free else "`--cpu` starts CPU ranks"
    return (
        f"You asked for {number} of {num_gpus} GPUs, and {free} can be had; {why}. {take}; "
        "--force (force=True) shares the GPUs."
    )


def lock_owners(devices: Sequence[str]) -> dict[str, Owner]:
    """Device -> who has locked it, of those that somebody has; asks without locking any."""
    found: dict[str, Owner] = {}
    for device in devices:
        path = _lock_file(lock_folder(), device)
        with contextlib.suppress(OSError):  # there is no such file: nobody ever has
            descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            if owner := _owner(descriptor):
                found[device] = owner
            os.close(descriptor)
    return found


def lock_folder() -> Path:
    """The folder that all users of this machine may write lock files to."""
    for place in _PLACES:
        with contextlib.suppress(OSError):
            everybodys = stat.S_ISVTX | stat.S_IWOTH
            # in a container its file system may be read-only all the same
            if place.stat().st_mode & everybodys == everybodys and os.access(place, os.W_OK):
                return place
    return Path(tempfile.gettempdir())


def hold_folder(folder: Path) -> int | None:
    """Mark a private folder as in use for as long as the descriptor that is returned is open.

    The mark is also seen where our process ids mean nothing (another container with the same
    folder for temporary files), and by systemd-tmpfiles. None: the file system has no such marks,
    or another process has marked it.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


class DeviceLocks:
    """The devices that this process has locked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}
        self._owner_pid = os.getpid()

    def take(
        self, devices: Sequence[str], number: int, force: bool = False
    ) -> tuple[list[str], dict[str, Owner]]:
        """Lock the first `number` of `devices` that are free; none at all if there are too few.

        Args:
            force: count devices that others have locked, or that cannot be locked, as free.

        Returns:
            The devices to use, and the owner of each that another process has locked.
        """
        taken: list[str] = []
        others: dict[str, Owner] = {}
        for device in devices:
            if len(taken) == number:
                break
            try:
                other = self._lock(device)
            except OSError:  # the lock file is not ours to use
                if not force:
                    raise
                other = None
            if other is not None:
                others[device] = other
            if other is None or force:
                taken.append(device)
        if len(taken) < number:
            self.release()
            return [], others
        return taken, others

    def release(self) -> None:
        """Release every device."""
        for descriptor in self._held.values():
            if os.getpid() == self._owner_pid:  # closing is not enough if one forked still has it
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
        self._held.clear()

    def _lock(self, device: str) -> Owner | None:
        """Lock one device; returns its owner instead if it is another pool."""
        if device in self._held:
            return None
        descriptor = _open(_lock_file(self._folder, device))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found = _owner(descriptor)
            os.close(descriptor)
            return found
        self._held[device] = descriptor
        return None


def _lock_file(folder: Path, device: str) -> Path:
    return folder / f"gpupool-{re.sub(r'[^A-Za-z0-9.-]', '-', device)}.lock"


def _open(path: Path) -> int:
    """Open a lock file, for the first time or one that another user has made.

    The folder is everybody's: a link set there must not lead us to write elsewhere, and a lease
    (fcntl(2)) on the file must not keep us waiting.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        # The umask took that away; another user has to lock it too.
        os.fchmod(descriptor, 0o666)  # nosec B103 # nothing in it is trusted
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(descriptor)
        raise PermissionError(f"{path} is not an ordinary file; it is not used as a lock")
    return descriptor


def _owner(descriptor: int) -> Owner:
    """Who holds the lock of this file; {} if that cannot be seen from here, as in a container."""
    found = os.fstat(descriptor)
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        pid = next(int(row[4]) for row in _locks() if row[1:2] == ["FLOCK"] and file in row[5:6])
        holder = psutil.Process(pid)
        name, user = holder.name(), holder.username()
        owner = Owner(pid=holder.ppid() if name == AGENT else pid, user=user)
    except (OSError, StopIteration, psutil.Error):  # it has released it, or ended, meanwhile
        return {}
    if name == ENDING_AGENT and user == this_user():  # others could say so for ever
        owner["is_ending"] = True
    return owner


def _locks() -> Iterator[list[str]]:
    """The rows of /proc/locks: "1: FLOCK  ADVISORY  WRITE 4711 fe:00:2280340 0 EOF".

    Who only waits has "->" in the second column.
    """
    for _ in range(_NUM_LOOKS):
        with open("/proc/locks", "rb") as locks:
            for line in locks.read(_MAX_LOCKS_BYTES).decode().splitlines():
                yield line.split()
