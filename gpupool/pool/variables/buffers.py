"""Data beside pickles in memory that the ranks of this host map: each content once. On the client.

Values of cells, constants and data sets of trainings come from here. The digest decides what is the
same: data that were changed in place are written again, and a part of a data set, or another one
around the same tensors, is not. Nothing here talks to a rank: who is given a place opens the file.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import psutil
import xxhash

from gpupool.core.errors import PoolError
from gpupool.core.machine import limits
from gpupool.core.progress import BYTES, progress
from gpupool.core.wire.pickles import INLINE_BYTES, DataPacker, MemoryFile, Packed, Part, inline

_MIN_BYTES = 1 << 10  # smaller parts go along in the message: to know them costs more
_MARGIN = 0.95  # of the memory that is free

Digest = tuple[int, bytes]  # how many bytes, and their digest


class Stored:
    """A content that is in a file, as long as somebody refers to this."""

    def __init__(self, file: MemoryFile, start: int) -> None:
        self.file, self.start = file, start


def keys_of(packer: DataPacker) -> list[Digest]:
    """What the parts of a packed value are known by: its data, and at the end its pickle."""
    parts = [*packer.buffers, memoryview(packer.stream())]
    return [(part.nbytes, xxhash.xxh3_128_digest(part)) for part in parts]


class Buffers:
    """What has been written for ranks, while a parcel, a job or a data set has it."""

    def __init__(self) -> None:
        self._stored = weakref.WeakValueDictionary[Digest, Stored]()
        # id of who has it -> a reference to that, and the contents
        self._kept: dict[int, tuple[weakref.ref[Any], Sequence[Stored | None]]] = {}
        self._lock = threading.Lock()

    def pack(
        self, packer: DataPacker, what: str, keys: Sequence[Digest] = ()
    ) -> tuple[Packed, list[Stored | None]]:
        """A packed value as it crosses, and what keeps each part of it where the ranks map it; a
        PoolError if there is too little memory. `what` it is says a bar."""
        parts = [*packer.buffers, memoryview(packer.stream())]
        if packer.num_bytes <= INLINE_BYTES:
            return [inline(part) for part in parts], []
        keys = keys or keys_of(packer)
        with self._lock:
            large = {k: p for k, p in zip(keys, parts, strict=True) if p.nbytes >= _MIN_BYTES}
            found = {key: stored for key in large if (stored := self._stored.get(key))}
            new = {key: part for key, part in large.items() if key not in found}
            found |= self._write(new, what) if new else {}
        contents = [found.get(key) for key in keys]
        wire = [
            Part(part.nbytes, part.readonly, path=there.file.path, start=there.start)
            if there
            else inline(part)
            for there, part in zip(contents, parts, strict=True)
        ]
        return wire, contents

    def keep(self, owner: object, contents: Sequence[Stored | None]) -> None:
        """Keep contents while this object lives, in place of what was kept for it before."""
        kept, key = self._kept, id(owner)
        try:
            kept[key] = weakref.ref(owner, lambda _: kept.pop(key, None)), contents
        except TypeError:  # a list, say: nothing tells when it goes
            return

    def clear(self) -> None:
        """The pool has stopped: nobody maps them any more."""
        self._kept.clear()

    def _write(self, new: dict[Digest, memoryview], what: str) -> dict[Digest, Stored]:
        num_bytes = sum(part.nbytes for part in new.values())
        _check_memory(num_bytes)
        file = MemoryFile()
        with progress(f"Sending {what}", num_bytes, BYTES) as bar:
            parts = file.write(list(new.values()), bar.advance)
        written = {key: Stored(file, part.start) for key, part in zip(new, parts, strict=True)}
        self._stored.update(written)
        return written


def _check_memory(num_bytes: int) -> None:
    """Refuse what would have the kernel end processes: no disk has these pages."""
    free = psutil.virtual_memory().available
    limit = limits.memory_limit()
    if limit:
        free = min(free, limit - psutil.Process().memory_info().rss)
    if num_bytes > _MARGIN * free:
        raise PoolError(
            f"it takes {num_bytes / 2**30:.1f} GiB once more, as the copy that all ranks share, "
            f"and {free / 2**30:.1f} GiB of memory are free. Keep the data in files that ranks "
            "map: numpy.load(path, mmap_mode='r')."
        )
