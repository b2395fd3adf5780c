"""What was read once from a store, kept on the disk of this host for all its ranks. Runs anywhere.

A cache is a folder for each source, and in it a file for each content, as long as there is room.
Nobody waits for a lock: a file is written under another name, and renamed when it is whole. It
begins with its checksum, so one that a crash of the machine has torn is not served. No name is in
the clear, a URL or a key of a store: a file is called by the hash of what it holds.
"""

from __future__ import annotations

import contextlib
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
    once in the log, and reading continues without. A changed file is read from the store again; one
    without a version (no ETag) always.

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

    def open(self) -> Path:
        """Where the cache lies on this host. Raises DataError if its folder cannot be made."""
        return _place(self.folder)

    def read(self, file: FileRef, start: int = 0, length: int | None = None) -> bytes:
        """A whole file, or `length` bytes of it from `start`, from the disk or else the store.

        Raises what the source raises.
        """
        if not file.version:
            return self.source.read(file, start, length)
        place = self.open()
        content = (self.name(file.path), file.size, file.version, start, length)
        path = place / _hash_of(self.shown_url) / _hash_of(*content)
        data = _tried(place, lambda: _found(path))
        if data is not None:
            counts.add(cached_reads=1)
            return data
        data = self.source.read(file, start, length)
        _tried(place, lambda: _keep(path, data, int(self.limit_gib * 2**30)))
        return data


def cached(source: Source, limit_gib: float, folder: str | None = None) -> Cached:
    """`source` through the cache; if it is already, with the new limit and folder."""
    return Cached(source.source if isinstance(source, Cached) else source, limit_gib, folder)


@functools.cache
def _place(folder: str | None) -> Path:
    if folder is None:
        return cache_folder("objects")
    own = private_folder(Path(folder) / f"gpupool-{os.geteuid()}")  # others may have theirs beside
    return private_folder(own / "objects")


def _tried(place: Path, operation: Callable[[], T]) -> T | None:
    """What it gives; None if there is no such file, or if the disk fails: that is said once."""
    try:
        return operation()
    except FileNotFoundError:  # somebody may remove all of it at any time
        return None
    except (OSError, DataError) as error:
        _say(place, str(getattr(error, "strerror", None) or error))
        return None


@functools.cache
def _say(place: Path, why: str) -> None:
    """What is wrong, once."""
    logging.getLogger("gpupool").warning(
        "the cache in %s cannot be used (%s); reading continues from the store. "
        "Make room there, or give ds.cached() another folder=.",
        place,
        why,
    )


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


def _keep(path: Path, data: bytes, limit: int) -> None:
    num_blocks = (8 + len(data)) // _BLOCK + 1
    # Another process may have written it while this one fetched.
    if path.exists() or not _has_room(private_folder(path.parents[1]), num_blocks * _BLOCK, limit):
        return
    with open(private_folder(path.parent) / _BLOCKS, "ab") as blocks:
        blocks.write(bytes(num_blocks))
    part = path.with_suffix(f".{secrets.token_hex(4)}")
    try:
        part.write_bytes(xxhash.xxh3_64_digest(data) + data)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def _has_room(place: Path, needed: int, limit: int) -> bool:
    """Whether there is room, after removing whole sources that nobody reads any more.

    Of a source in use nothing is removed. One that is larger than the limit, read in another order
    every epoch, would else push out what it needs next, write the disk all day and find nothing.
    The part that fits is kept instead, the rest is read from the store.
    """
    found = []
    for source in place.iterdir():
        blocks = source / _BLOCKS  # not there if a removal was cut off
        num_bytes = blocks.stat().st_size * _BLOCK if blocks.exists() else 0
        found.append((source.stat().st_mtime, num_bytes, source))
    disk = os.statvfs(place)
    others = min(2 * 2**30, disk.f_blocks * disk.f_frsize // 20)
    left = min(disk.f_bavail * disk.f_frsize - others, limit - sum(one[1] for one in found))
    for used_at, num_bytes, source in sorted(found):
        if needed <= left or needed > limit or used_at > time.time() - _IN_USE_S:
            break
        with contextlib.suppress(OSError):  # another process does it; who writes begins a new one
            shutil.rmtree(source.rename(source.with_suffix(f".{secrets.token_hex(4)}")))
        left += num_bytes
    return needed <= left


def _hash_of(*parts: object) -> str:
    named = "\0".join(map(str, parts)).encode(errors="surrogateescape")
    return xxhash.xxh3_128_hexdigest(named)
