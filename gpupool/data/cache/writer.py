"""Adds records to a folder, within a limit of space that all processes keep to. Runs anywhere.

See `records` for what lies in the folder. Room is made by removing whole pairs of files, those
whose last use is longest ago. Pairs in use are never removed for new ones: a data set larger than
the limit, read in another order every epoch, would else push out what it needs next, write the disk
all day and find nothing. It keeps the part that fits instead, and reads the rest from the store.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpupool.data.cache.cache_folder import private_folder
from gpupool.data.cache.records import ENTRY, Key, checksum, is_finished

_MIB = 2**20
_LOCK_WAIT_S = 2.0  # the lock of the folder is held for milliseconds, unless a process is stopped
_TRY_AGAIN_S = 10.0  # after there was no room


def pair_bytes(limit: int) -> int:
    """How large a data file grows under a limit in bytes: small enough that few make room."""
    return max(_MIB, min(128 * _MIB, limit // 64))


@dataclass(frozen=True)
class Stored:
    """One pair of files in a folder: its size in bytes, and when it was last used (epoch s)."""

    name: str
    num_bytes: int
    used_at: float
    is_finished: bool

    def charge(self, grows_to: int) -> int:
        """What it counts against a limit: all that it may grow to."""
        return self.num_bytes if self.is_finished else max(self.num_bytes, grows_to)


def to_remove(
    pairs: Sequence[Stored], needed: int, limit: int, free: int, idle_since: float
) -> list[Stored] | None:
    """Which pairs make room for `needed` bytes, least recently used first; None if there is none.

    All pairs and the new one keep to `limit`; on the disk, `free` bytes may be taken. Pairs that
    were used after `idle_since` stay.
    """
    grows_to = pair_bytes(limit)
    total = sum(pair.charge(grows_to) for pair in pairs)
    removed: list[Stored] = []
    for pair in sorted(pairs, key=lambda pair: pair.used_at):
        if total + needed <= limit and needed <= free:
            break
        if pair.used_at > idle_since:
            return None
        removed.append(pair)
        total -= pair.charge(grows_to)
        free += pair.num_bytes
    return removed if total + needed <= limit and needed <= free else None


class Writer:
    """Adds records to `folder`; any thread may call it.

    A pair of files that was used in the last `in_use_s` is not removed. `clock` gives the time in
    seconds since the epoch.
    """

    def __init__(
        self, folder: Path, in_use_s: float = 300.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._in_use_s = in_use_s
        self._clock = clock
        self._lock = threading.Lock()
        self._open: _OpenPair | None = None
        self._full_until = 0.0

    def write(self, key: Key, data: bytes, limit: int) -> bool:
        """Add a record, all records of the folder taking at most `limit` bytes; False: no room.

        Raises OSError or DataError if the disk cannot be written to, or is nearly full.
        """
        # One object must not push out everything else.
        if len(data) > limit // 4:
            return False
        with self._lock:
            if not self._has_room(len(data), limit):
                return False
            assert self._open is not None
            try:
                self._open.append(key, data)
            # Half an entry may be there: whoever takes the pair over cuts it off.
            except BaseException:
                self.close_files()
                raise
            return True

    def close_files(self) -> None:
        """Close the files; another writer may continue them."""
        if self._open is not None:
            self._open.close()
        self._open = None

    def _has_room(self, size: int, limit: int) -> bool:
        """Whether a pair with room for `size` bytes is open, after opening one."""
        if self._open is not None:
            end = self._open.end()
            # A record larger than a pair is the only one in its pair.
            if end is not None and (end == 0 or end + size <= pair_bytes(limit)):
                return True
        # Looking for room lists the folder: not for every record that finds none.
        if self._clock() < self._full_until:
            return False
        if self._open is not None:
            self._open.finish()
            self.close_files()
        private_folder(self._folder)
        with _locked(self._folder / "lock") as is_locked:
            self._open = self._opened(size, limit) if is_locked else None
        if self._open is None:
            self._full_until = self._clock() + _TRY_AGAIN_S
        return self._open is not None

    def _opened(self, size: int, limit: int) -> _OpenPair | None:
        """A pair that a process has left, or a new one; None without room for it."""
        now = self._clock()
        pairs = _stored(self._folder, now + self._in_use_s)
        for pair in pairs:
            if not pair.is_finished and pair.num_bytes + size <= pair_bytes(limit):
                taken_over = _OpenPair.take_over(self._folder, pair.name)
                if taken_over is not None:
                    return taken_over
        # All that the pair may grow to is reserved now: ranks that write at once keep to the limit.
        needed = max(size, pair_bytes(limit))
        free = _free(self._folder)
        removed = to_remove(pairs, needed, limit, free, now - self._in_use_s)
        if removed is None:
            if needed > free:
                raise OSError(errno.ENOSPC, "the disk has less room than is left to others")
            return None
        for pair in removed:
            # In this order: data without an index is nobody's, and goes with the next listing.
            (self._folder / f"{pair.name}.index").unlink(missing_ok=True)
            (self._folder / f"{pair.name}.data").unlink(missing_ok=True)
        return _OpenPair.create(self._folder, now)


@dataclass(frozen=True)
class _OpenPair:
    """The descriptors of a pair of files that this process alone writes to."""

    data: int
    index: int

    @classmethod
    def create(cls, folder: Path, now: float) -> _OpenPair:
        name = f"{int(now * 1000):x}-{secrets.token_hex(4)}"  # so that names sort by age
        pair = cls._opened(folder, name, os.O_CREAT | os.O_EXCL)
        fcntl.flock(pair.index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return pair

    @classmethod
    def take_over(cls, folder: Path, name: str) -> _OpenPair | None:
        """The pair of a process that has ended; None if another writes to it, or has finished it.

        Readers do not look at a finished pair again.
        """
        try:
            pair = cls._opened(folder, name)
        except (FileNotFoundError, PermissionError):  # removed or finished since it was listed
            return None
        try:
            fcntl.flock(pair.index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pair.close()
            return None
        found = os.fstat(pair.index)
        if is_finished(found):
            pair.close()
            return None
        whole = found.st_size - found.st_size % ENTRY.itemsize  # it may have ended in an entry
        os.ftruncate(pair.index, whole)
        return pair

    @classmethod
    def _opened(cls, folder: Path, name: str, flags: int = 0) -> _OpenPair:
        flags |= os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        data = os.open(folder / f"{name}.data", flags, 0o600)
        try:
            return cls(data, os.open(folder / f"{name}.index", flags, 0o600))
        except OSError:
            os.close(data)
            raise

    def end(self) -> int | None:
        """The size of the data in bytes; None if the files have been removed."""
        found = os.fstat(self.index)
        return os.fstat(self.data).st_size if found.st_nlink else None

    def append(self, key: Key, data: bytes) -> None:
        offset = os.fstat(self.data).st_size
        entry = np.array([(*key, offset, len(data), checksum(data))], ENTRY).tobytes()
        _write(self.data, data)
        _write(self.index, entry)

    def finish(self) -> None:
        """Say that nothing will be added."""
        os.fchmod(self.data, 0o400)
        os.fchmod(self.index, 0o400)

    def close(self) -> None:
        os.close(self.data)
        os.close(self.index)


def _stored(folder: Path, latest: float) -> list[Stored]:
    """The pairs of files in a folder whose lock is held; removes data that has no index.

    A use after `latest` was noted by a clock that was wrong: such a pair would stay for ever.
    """
    with os.scandir(folder) as entries:
        found = {entry.name: entry.stat() for entry in entries}
    pairs = []
    for name, data in found.items():
        stem, ending = os.path.splitext(name)
        if ending != ".data":
            continue
        index = found.get(f"{stem}.index")
        if index is None:
            (folder / name).unlink(missing_ok=True)
            continue
        size = data.st_size + index.st_size
        used_at = index.st_mtime if index.st_mtime <= latest else 0.0
        pairs.append(Stored(stem, size, used_at, is_finished(index)))
    return pairs


def _free(folder: Path) -> int:
    """How many bytes of the disk may be taken; some are left to others."""
    disk = os.statvfs(folder)
    left_to_others = min(2 * 2**30, disk.f_blocks * disk.f_frsize // 20)
    return disk.f_bavail * disk.f_frsize - left_to_others


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a file; gives False if another process has not released it for seconds."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield _flock(descriptor, time.monotonic() + _LOCK_WAIT_S)
    finally:
        os.close(descriptor)


def _flock(descriptor: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.005)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
