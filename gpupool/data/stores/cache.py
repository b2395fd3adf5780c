"""What was read once from a store, kept on the disk of this host for all its ranks. Runs anywhere.

A file for each content, called by the hash of its key: no URL is in the clear. Nobody waits for a
lock: it is written under another name, and renamed when it is whole. It begins with its checksum,
so one that a crash of the machine has torn is not served.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from gpupool.core.errors import DataError, OptionsError
from gpupool.data.stores.folder import FileRef, Source
from gpupool.data.stores.retry import counts

_MIN_LIMIT_GIB = 1 / 64
_BLOCK = 4096  # bytes that a file of one byte takes on a disk
_BLOCKS = "blocks"  # a file with one byte for each block of all others: appends need no lock


@dataclass(frozen=True)
class Cache:
    """Keeps what is read of sources on this host, of at most `limit_gib`: see `Datastore.cached`.

    It lies in a private folder below `folder`, or `cache_folder()`, and leaves 5 % of the disk, or
    2 GiB, to others. When it is full, nothing is added; if it is full when a process comes to it,
    the older half makes room. If the disk cannot be written to, or read, that is said once in the
    log, and reading continues without. A changed file is read from the store again; one without a
    version (no ETag) always.
    """

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

    def open(self, source: Source) -> Path:
        """Where it lies on this host. Raises DataError if its folder cannot be made."""
        return _opened(self.folder, int(self.limit_gib * 2**30), source.shown_url)

    def read(
        self, source: Source, file: FileRef, start: int = 0, length: int | None = None
    ) -> bytes:
        """As `source.read`, from the disk or else the store. Raises what that raises."""
        read = partial(source.read, file, start, length)
        if not file.version:
            return read()
        key = (source.name(file.path), file.size, file.version, start, length)
        limit = int(self.limit_gib * 2**30)
        return kept(self.open(source), limit, "\0".join(map(str, key)), read)


def kept(place: Path, limit: int, key: str, make: Callable[[], bytes]) -> bytes:
    """The content of this key from the folder `place`; else what `make` gives, which is put there,
    if all that is there stays below `limit` bytes. Raises what `make` raises.
    """
    digest = xxhash.xxh3_128_hexdigest(key.encode(errors="surrogateescape"))
    path = place / digest[:2] / digest
    with _faults_said(place):
        with open(path, "rb", buffering=0) as file:
            check, data = file.read(8), file.read()
        if xxhash.xxh3_64_digest(data) == check:
            counts.add(cached_reads=1)
            return data
        path.unlink(missing_ok=True)
    data = make()
    with _faults_said(place):
        num_blocks = (8 + len(data)) // _BLOCK + 1
        # Another process may have written it while this one fetched.
        if num_blocks * _BLOCK <= _room(private_folder(place), limit) and not path.exists():
            with open(place / _BLOCKS, "ab") as blocks:
                blocks.write(bytes(num_blocks))
            part = private_folder(path.parent) / f"{digest}.{secrets.token_hex(4)}"
            try:
                part.write_bytes(xxhash.xxh3_64_digest(data) + data)
                part.rename(path)
            finally:
                part.unlink(missing_ok=True)
    return data


@functools.cache
def _opened(folder: str | None, limit: int, url: str) -> Path:
    """The private folder of a cache, with room for what this process reads of `url`."""
    if folder is None:
        place = cache_folder("objects")
    else:  # others may have theirs beside
        own = private_folder(Path(folder) / f"gpupool-{os.geteuid()}")
        place = private_folder(own / "objects")
    with _faults_said(place):
        if _room(place, limit) < limit // 32:
            _sweep(place, limit // 2)
    return place


def _room(place: Path, limit: int) -> int:
    disk, blocks = os.statvfs(place), place / _BLOCKS
    others = min(2 * 2**30, disk.f_blocks * disk.f_frsize // 20)
    used = blocks.stat().st_size * _BLOCK if blocks.exists() else 0
    return min(disk.f_bavail * disk.f_frsize - others, limit - used)


def _sweep(place: Path, most: int) -> None:
    """Remove what is there for longest, until at most so many bytes are left."""
    files = [(path.stat(), path) for path in place.glob("??/*")]
    there = [(status.st_mtime, status.st_size // _BLOCK + 1, path) for status, path in files]
    num_blocks = sum(one[1] for one in there)
    for _, size, path in sorted(there):
        if num_blocks * _BLOCK > most:
            path.unlink(missing_ok=True)
            num_blocks -= size
    (place / _BLOCKS).write_bytes(bytes(num_blocks))


@contextlib.contextmanager
def _faults_said(place: Path) -> Iterator[None]:
    """What fails with the disk ends the block, and is said once: reading goes on without it."""
    try:
        yield
    except FileNotFoundError:  # not there yet; and somebody may remove all of it at any time
        pass
    except (OSError, DataError) as error:
        _say(place, str(getattr(error, "strerror", None) or error))


@functools.cache
def _say(place: Path, why: str) -> None:
    logging.getLogger("gpupool").warning(
        "the cache in %s cannot be used (%s); reading continues from the store. "
        "Make room there, or give ds.cached() another folder=.",
        place,
        why,
    )


def cache_folder(*parts: str) -> Path:
    """`$XDG_CACHE_HOME/gpupool/<parts>` (default `~/.cache/gpupool`), as a `private_folder`."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    # The standard says that a relative path is to be ignored.
    base = Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache"
    private_folder(base / "gpupool")
    return private_folder(base.joinpath("gpupool", *parts))


def private_folder(path: Path) -> Path:
    """`path`, as a folder that its owner alone may enter (mode 0700), made if it is not there.

    Raises DataError if that cannot be had: no room, no right, or another user's folder.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(0, "it is a link, or another user's")
        if stat.S_IMODE(found.st_mode) != 0o700:
            path.chmod(0o700)
    except OSError as error:
        raise DataError(
            f"{path} cannot be a private folder ({error.strerror}); give a folder of yours, or set "
            "XDG_CACHE_HOME to one, best on a local disk",
            "cannot make",
        ) from None
    return path
