"""Records on disk that many processes of a host write and read without waiting. Runs anywhere.

A folder holds pairs of files. `NAME.data` is records one after another; `NAME.index` has one entry
of 40 bytes for each: key, place, length, checksum. Both only grow; a finished pair is read-only.
One process at a time writes to a pair, the one that holds the flock(2) on its index; all read all.
An entry follows its record, so what a killed process leaves behind is a record without
an entry, which nobody sees. Whatever else may be torn, by a crash of the machine say, does not have
the checksum in its entry, and is not served.

Nothing here is a name, a URL or a key of a store: records are found by the hash of what they are.

SQLite, and with it diskcache, would find records as well; but it has one writer at a time for all
ranks, says "database is locked" when many open it at once, and breaks on network file systems.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

ENTRY = np.dtype([(name, "<u8") for name in ("high", "low", "offset", "length", "check")])
_Entries = NDArray[np.void]
_Numbers = NDArray[np.uint64]
_RACY_NS = 100_000_000  # a folder changed less than this ago may change again unseen


class Key(NamedTuple):
    """128 bits that stand for what a record holds."""

    high: int
    low: int


def key_of(*parts: object) -> Key:
    """The key of whatever `parts` name together."""
    named = "\0".join(map(str, parts)).encode(errors="surrogateescape")
    digest = xxhash.xxh3_128_intdigest(named)
    return Key(digest >> 64, digest & (2**64 - 1))


def checksum(data: bytes) -> int:
    """The checksum of a record, for its entry."""
    return xxhash.xxh3_64_intdigest(data)


def is_finished(found: os.stat_result) -> bool:
    """Whether this file belongs to a finished (read-only) pair."""
    return not found.st_mode & stat.S_IWUSR


@dataclass
class _Pair:
    """One pair of files as far as it has been read: `entries[:count]`."""

    name: str
    entries: _Entries = field(default_factory=lambda: np.empty(0, ENTRY))
    count: int = 0
    finished: bool = False
    used_at: float = 0.0  # when its use was last noted on disk, by `clock`

    def add(self, new: _Entries) -> None:
        after = self.count + len(new)
        if after > len(self.entries):
            grown = np.empty(max(2 * self.count, after), ENTRY)
            grown[: self.count] = self.entries[: self.count]
            self.entries = grown
        self.entries[self.count : after] = new
        self.count = after


class Records:
    """What the records of a folder are, as this process knows it; any thread may ask.

    It holds 56 bytes a record, and no open file. `note_every_s` is how often the use of a pair of
    files is noted, as the time its index was changed; `clock` gives seconds since the epoch.
    """

    def __init__(
        self, folder: Path, note_every_s: float = 60.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._note_every_s = note_every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._pairs: dict[int, _Pair] = {}  # by number
        self._numbers: dict[str, int] = {}
        self._num_seen = 0
        self._table = _Table()
        self._listed_ns = -1  # when the folder was changed, as it was last listed

    def find(self, key: Key) -> bytes | None:
        """The record of `key`, whole and as it was written; None if this process knows of none."""
        found = self._entry(key)
        if found is None:
            return None
        pair, offset, length, check = found
        try:
            data = _read(self._folder / f"{pair.name}.data", offset, length)
        except FileNotFoundError:  # taken away to make room
            return None
        with contextlib.suppress(OSError):  # gone by now, or on a disk where no room can be made
            self._note_use(pair)
        return data if len(data) == length and checksum(data) == check else None

    def knows(self, key: Key) -> bool:
        """Whether there is a record of `key`, as far as can be said without reading it."""
        return self._entry(key) is not None

    def refresh(self) -> None:
        """Learn what has been written, by any process, and what is gone; takes microseconds."""
        with self._lock:
            self._list()
            new = []
            for number, pair in self._pairs.items():
                if pair.finished:
                    continue
                before = pair.count
                self._read_entries(pair)
                places = np.arange(before, pair.count, dtype=np.uint64) | np.uint64(number << 32)
                new.append((pair.entries["high"][before : pair.count], places))
            self._table.add(new, alive=self._pairs.keys())

    def _entry(self, key: Key) -> tuple[_Pair, int, int, int] | None:
        """The pair of files, place, length and checksum of a record."""
        place = self._table.find(key.high)
        pair = self._pairs.get(place >> 32) if place is not None else None
        if place is None or pair is None:
            return None
        _, low, offset, length, check = pair.entries[place & 0xFFFFFFFF].item()
        return (pair, offset, length, check) if low == key.low else None

    def _list(self) -> None:
        try:
            changed_ns = self._folder.stat().st_mtime_ns
        except FileNotFoundError:  # somebody has removed the whole folder
            self._pairs, self._numbers, self._listed_ns = {}, {}, -1
            return
        if changed_ns == self._listed_ns:
            return
        names = {name[:-6] for name in os.listdir(self._folder) if name.endswith(".index")}
        for name in self._numbers.keys() - names:
            del self._pairs[self._numbers.pop(name)]
        for name in sorted(names - self._numbers.keys()):
            self._numbers[name] = self._num_seen
            self._pairs[self._num_seen] = _Pair(name)
            self._num_seen += 1
        is_racy = abs(time.time_ns() - changed_ns) < _RACY_NS
        self._listed_ns = -1 if is_racy else changed_ns

    def _read_entries(self, pair: _Pair) -> None:
        """Read on in the index of a pair."""
        path = self._folder / f"{pair.name}.index"
        start = pair.count * ENTRY.itemsize
        try:
            found = path.stat()
            if found.st_size >= start + ENTRY.itemsize:
                data = _read(path, start, found.st_size - start)
                pair.add(np.frombuffer(data, ENTRY, len(data) // ENTRY.itemsize))
            pair.finished = is_finished(found)
        except FileNotFoundError:  # it is gone, as the next listing says
            pair.finished = True

    def _note_use(self, pair: _Pair) -> None:
        now = self._clock()
        if now - pair.used_at >= self._note_every_s:
            pair.used_at = now
            os.utime(self._folder / f"{pair.name}.index", (now, now))


class _Table:
    """From the first half of a key to the place of its newest record.

    Sorted arrays, 16 bytes a record, and a small dictionary for those that came last: a dictionary
    for all would be ten times as large.
    """

    def __init__(self) -> None:
        self._sorted: tuple[_Numbers, _Numbers] = (np.empty(0, np.uint64), np.empty(0, np.uint64))
        self._recent: dict[int, int] = {}

    def find(self, high: int) -> int | None:
        place = self._recent.get(high)
        if place is not None:
            return place
        keys, places = self._sorted
        after = int(np.searchsorted(keys, np.uint64(high), side="right"))
        return int(places[after - 1]) if after and int(keys[after - 1]) == high else None

    def add(self, new: Sequence[tuple[_Numbers, _Numbers]], alive: Collection[int]) -> None:
        """Add (keys, places) of newer records; those outside the pairs `alive` may go."""
        size = max(10_000, len(self._sorted[0]) // 4)
        if sum(len(keys) for keys, _ in new) + len(self._recent) < size:
            for keys, places in new:
                self._recent.update(zip(keys.tolist(), places.tolist(), strict=True))
            return
        recent = (_numbers(self._recent.keys()), _numbers(self._recent.values()))
        parts = [self._sorted, recent, *new]
        all_keys, all_places = (np.concatenate(column) for column in zip(*parts, strict=True))
        kept = np.isin(all_places >> np.uint64(32), _numbers(alive))
        all_keys, all_places = all_keys[kept], all_places[kept]
        order = np.argsort(all_keys, kind="stable")  # so the newest of a key is its last
        self._sorted = all_keys[order], all_places[order]
        self._recent = {}


def _numbers(values: Collection[int]) -> _Numbers:
    return np.fromiter(values, np.uint64, len(values))


def _read(path: Path, offset: int, length: int) -> bytes:
    """`length` bytes from `offset` of a file, or what there is; no file stays open.

    What a torn entry asks for beyond the end of the file takes no memory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        left = max(0, min(length, os.fstat(descriptor).st_size - offset))
        parts = []
        while left and (part := os.pread(descriptor, left, offset)):  # at most 2 GiB in one call
            parts.append(part)
            offset, left = offset + len(part), left - len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)
