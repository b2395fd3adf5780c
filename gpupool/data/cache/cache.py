"""What was read once from a store, kept on the disk of this host for all its ranks. Runs anywhere.

    source = Cached(Folder("s3://photos/train"), limit_gib=200, folder="/local")
    source.read(file)        # from the store, once
    source.read(file)        # from the disk, in this process or any other of the host

What is kept belongs to one version of a file: a changed file is read from the store again. Files of
a store without versions (no ETag) are always read from the store.

A cache is a folder for each source, and in it a file for each content, as long as there is room.
No name is in the clear, a URL or a key of a store: a file is called by the hash of what it holds.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from gpupool.core.errors import DataError, OptionsError
from gpupool.data.cache.cache_folder import cache_folder, private_folder
from gpupool.data.stores.interface import FileRef, Source
from gpupool.data.stores.retry import counts

T = TypeVar("T")
_MIN_LIMIT_GIB = 1 / 64
_IN_USE_S = 300.0  # what was used within this makes no room for others
_BLOCK = 4096  # bytes that a file of one byte takes on a disk
_BLOCKS = "blocks"  # a file with one byte for each block of its folder: appends need no lock


@dataclass(frozen=True)
class Cached:
    """A `Source` that keeps what it reads in a cache of this host, of at most `limit_gib`.

    The cache lies in a private folder below `folder`, or `cache_folder()`; make it a local disk.
    It is shared by all processes of the user on the host, and stays when they end. It also leaves
    5 % of the disk, or 2 GiB, to others. If the disk cannot be written to, or read, that is said
    once in the log, and reading continues without.

    Raises OptionsError for a limit too small or infinite, DataError if the folder cannot be made.
    """

    source: Source
    limit_gib: float
    folder: str | None = None

    def __post_init__(self) -> None:
        if not _MIN_LIMIT_GIB <= self.limit_gib < math.inf:
            raise OptionsError(
                f"limit_gib={self.limit_gib} must be at least 1/64 (16 MiB), and finite"
            )
        if self.folder is not None:  # an engine may have another working directory
            place = os.path.abspath(os.path.expanduser(self.folder))
            object.__setattr__(self, "folder", place)

    @property
    def shown_url(self) -> str:
        """Where the files lie, as it may be printed."""
        return self.source.shown_url

    def name(self, path: str) -> str:
        """The printable URL of a file."""
        return self.source.name(path)

    def read(self, file: FileRef, start: int = 0, length: int | None = None) -> bytes:
        """A whole file, or `length` bytes of it from `start`, from the disk or else the store.

        Raises what the source raises.
        """
        if not file.version:
            return self.source.read(file, start, length)
        content = (self.source.name(file.path), file.size, file.version, start, length)
        path = f"{_hash_of(self.shown_url)}/{_hash_of(*content)}"
        limit = int(self.limit_gib * 2**30)
        return self.open().read(path, lambda: self.source.read(file, start, length), limit)

    def open(self) -> DiskCache:
        """The cache on this host. Raises DataError if its folder cannot be made."""
        return _opened(self.folder)


def cached(source: Source, limit_gib: float, folder: str | None = None) -> Cached:
    """`source` through the cache; if it is already, with the new limit and folder."""
    return Cached(source.source if isinstance(source, Cached) else source, limit_gib, folder)


class DiskCache:
    """The contents kept in one folder, read and written by all threads of all processes.

    Nobody waits for a lock: a file is written under another name, and renamed when it is whole. A
    file that a crash of the machine has torn does not have the checksum at its beginning, and is
    not served.
    """

    def __init__(self, folder: Path) -> None:
        self.stopped = ""
        self._folder = folder

    def read(self, name: str, fetch: Callable[[], bytes], limit: int) -> bytes:
        """The content `name` ("source/content"), else what `fetch` gives.

        That is kept if all of the folder then takes at most `limit` bytes.
        """
        path = self._folder / name
        data = self._tried(lambda: _found(path))
        if data is not None:
            counts.add(cached_reads=1)
            return data
        data = fetch()
        if not self.stopped:
            self._tried(lambda: self._keep(path, data, limit))
        return data

    def _tried(self, operation: Callable[[], T]) -> T | None:
        """What it gives; None if there is no such file, or if the disk fails: that is said once."""
        try:
            return operation()
        except FileNotFoundError:  # somebody may remove all of it at any time
            return None
        except (OSError, DataError) as error:
            if not self.stopped:
                self.stopped = getattr(error, "strerror", None) or str(error)
                logging.getLogger("gpupool").warning(
                    "nothing more is added to the cache in %s (%s); reading continues from the "
                    "store. Make room there, or give ds.cached() another folder=.",
                    self._folder,
                    self.stopped,
                )
            return None

    def _keep(self, path: Path, data: bytes, limit: int) -> None:
        num_blocks = (8 + len(data)) // _BLOCK + 1
        # Another process may have written it while this one fetched.
        if path.exists() or not self._has_room(num_blocks * (_BLOCK + 1), limit):
            return
        private_folder(path.parent)
        with open(path.parent / _BLOCKS, "ab", opener=_private) as blocks:
            blocks.write(bytes(num_blocks))
        part = path.with_suffix(f".{secrets.token_hex(4)}")
        try:
            with open(part, "wb", opener=_private) as file:
                file.write(xxhash.xxh3_64_digest(data))
                file.write(data)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)

    def _has_room(self, needed: int, limit: int) -> bool:
        """Whether there is room, after removing whole sources that nobody reads any more.

        Of a source in use nothing is removed. One that is larger than the limit, read in another
        order every epoch, would else push out what it needs next, write the disk all day and find
        nothing. The part that fits is kept instead, the rest is read from the store.
        """
        sources = sorted(_sources(private_folder(self._folder)))
        left = limit - sum(num_bytes for _, num_bytes, _ in sources)
        free = _free(self._folder)
        for used_at, num_bytes, source in sources:
            if needed <= min(left, free) or used_at > time.time() - _IN_USE_S or needed > limit:
                break
            _remove(source)
            left, free = left + num_bytes, free + num_bytes
        if needed > free:
            raise OSError(errno.ENOSPC, "the disk has less room than is left to others")
        return needed <= left


def _found(path: Path) -> bytes | None:
    """What a file holds; None if that is not as it was written. Notes that its source is in use."""
    with open(path, "rb", buffering=0) as file:
        check, data = file.read(8), file.read()
    with contextlib.suppress(OSError):  # a disk that is read-only
        os.utime(path.parent)
    if xxhash.xxh3_64_digest(data) == check:
        return data
    path.unlink(missing_ok=True)
    return None


@functools.cache
def _opened(folder: str | None) -> DiskCache:
    if folder is None:
        return DiskCache(cache_folder("objects"))
    own = private_folder(Path(folder) / f"gpupool-{os.geteuid()}")  # others may have theirs beside
    return DiskCache(private_folder(own / "objects"))


def _hash_of(*parts: object) -> str:
    named = "\0".join(map(str, parts)).encode(errors="surrogateescape")
    return xxhash.xxh3_128_hexdigest(named)


def _sources(folder: Path) -> list[tuple[float, int, Path]]:
    """When each source was last used (epoch s), how many bytes it takes, and its folder."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            blocks = Path(entry.path, _BLOCKS)  # not there if a removal was cut off
            num_blocks = blocks.stat().st_size if blocks.exists() else 0
            found.append((entry.stat().st_mtime, num_blocks * (_BLOCK + 1), blocks.parent))
    return found


def _remove(source: Path) -> None:
    """Remove a source; whoever writes to it then begins a new one."""
    with contextlib.suppress(OSError):  # another process does it
        shutil.rmtree(source.rename(source.with_suffix(f".{secrets.token_hex(4)}")))


def _free(folder: Path) -> int:
    """How many bytes of the disk may be taken; some are left to others."""
    disk = os.statvfs(folder)
    left_to_others = min(2 * 2**30, disk.f_blocks * disk.f_frsize // 20)
    return disk.f_bavail * disk.f_frsize - left_to_others


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
