"""What was read once from a store, kept on the disk of this host for all its ranks. Runs anywhere.

    source = Cached(Folder("s3://photos/train"), limit_gib=200, folder="/local")
    source.read(file)        # from the store, once
    source.read(file)        # from the disk, in this process or any other of the host

What is kept belongs to one version of a file: a changed file is read from the store again. Files of
a store without versions (no ETag) are always read from the store.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpupool.core.errors import DataError, OptionsError
from gpupool.data.cache.cache_folder import cache_folder, private_folder
from gpupool.data.cache.records import Key, Records, key_of
from gpupool.data.cache.writer import Writer
from gpupool.data.stores.interface import FileRef, Source
from gpupool.data.stores.retry import counts
from gpupool.data.stores.waiting import interruptible

T = TypeVar("T")
_MIN_LIMIT_GIB = 1 / 64


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
        key = key_of(self.source.name(file.path), file.size, file.version, start, length)
        limit = int(self.limit_gib * 2**30)
        return self.open().read(key, lambda: self.source.read(file, start, length), limit)

    def open(self) -> DiskCache:
        """The cache on this host. Raises DataError if its folder cannot be made."""
        # Every read comes here: without the lock once it is open.
        return _opened.get(self.folder) or _open(self.folder)


def cached(source: Source, limit_gib: float, folder: str | None = None) -> Cached:
    """`source` through the cache; if it is already, with the new limit and folder."""
    return Cached(source.source if isinstance(source, Cached) else source, limit_gib, folder)


class DiskCache:
    """The records of one folder, read and written by the threads of this process.

    What takes locks or changes what is known is never done in the main thread, where an interrupt
    could end it half way.
    """

    def __init__(self, folder: Path, records: Records | None = None, writer: Writer | None = None):
        self.records = records or Records(folder)
        self.stopped = ""
        self._folder = folder
        self._writer = writer or Writer(folder)
        self._lock = threading.Lock()
        self._under_way: dict[Key, Future[bytes]] = {}

    def read(self, key: Key, fetch: Callable[[], bytes], limit: int) -> bytes:
        """The record of `key`, else what `fetch` gives, which is kept within `limit` bytes.

        While one thread fetches, others that want the same wait for it.
        """
        # The usual case changes nothing, so an interrupt may end it anywhere.
        data = self._find(key)
        if data is not None:
            return data
        return interruptible(lambda: self._read_shared(key, fetch, limit))

    def close_files(self) -> None:
        """Close the files it writes to."""
        self._writer.close_files()

    def _read_shared(self, key: Key, fetch: Callable[[], bytes], limit: int) -> bytes:
        with self._lock:
            others = self._under_way.get(key)
            mine = Future[bytes]()
            if others is None:
                self._under_way[key] = mine
        if others is not None:
            return others.result()
        try:
            data = self._read_once(key, fetch, limit)
            mine.set_result(data)
            return data
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._under_way[key]

    def _read_once(self, key: Key, fetch: Callable[[], bytes], limit: int) -> bytes:
        self._refresh()  # another process may have read it in the meantime
        data = self._find(key)
        if data is not None:
            return data
        # There is an entry, but its record is not what was written.
        damaged = self.records.knows(key)
        data = fetch()
        self._keep(key, data, limit, replace=damaged)
        return data

    def _keep(self, key: Key, data: bytes, limit: int, *, replace: bool) -> None:
        """Write a record if there is none, or to `replace` one: the newest of a key counts."""
        if self.stopped:
            return
        try:
            # Another process may have written it while this one fetched.
            self.records.refresh()
            if replace or not self.records.knows(key):
                self._writer.write(key, data, limit)
        except (OSError, DataError) as error:
            self._stop(error)

    def _find(self, key: Key) -> bytes | None:
        data = self._on_disk(lambda: self.records.find(key), None)
        if data is not None:
            counts.add(cached_reads=1)
        return data

    def _refresh(self) -> None:
        self._on_disk(self.records.refresh, None)

    def _on_disk(self, ask: Callable[[], T], otherwise: T) -> T:
        """What the disk gives, or `otherwise` if it cannot be read, which is said."""
        try:
            return ask()
        except OSError as error:
            self._stop(error)
            return otherwise

    def _stop(self, error: OSError | DataError) -> None:
        if self.stopped:
            return
        reason = error.strerror if isinstance(error, OSError) else str(error)
        self.stopped = reason or repr(error)
        logging.getLogger("gpupool").warning(
            "nothing more is added to the cache in %s (%s); reading continues from the store. "
            "Make room there, or give ds.cached() another folder=.",
            self._folder,
            self.stopped,
        )


_opened: dict[str | None, DiskCache] = {}
_opening = threading.Lock()


def _open(folder: str | None) -> DiskCache:
    with _opening:
        if folder not in _opened:
            _opened[folder] = DiskCache(_place(folder))
        return _opened[folder]


def _place(folder: str | None) -> Path:
    if folder is None:
        return cache_folder("objects")
    own = private_folder(Path(folder) / f"gpupool-{os.geteuid()}")  # others may have theirs beside
    return private_folder(own / "objects")


def _forget() -> None:
    """A forked child has locks and files of its own; those of its parent stay the parent's."""
    global _opening
    _opening = threading.Lock()
    for store in _opened.values():
        store.close_files()
    _opened.clear()


os.register_at_fork(after_in_child=_forget)
