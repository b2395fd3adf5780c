"""Data of data sets that the ranks of this host map: each content once, while the notebook has it.

As with values of cells, the digest decides what is the same: data that were changed in place are
sent again, and a part of a data set, or another one around the same tensors, is not. Nothing here
talks to a rank: who is given a place opens the file and maps it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil
import xxhash

from gpupool.core.errors import TrainingError
from gpupool.core.machine import limits
from gpupool.core.wire.pickles import MemoryFile, positions, write_file

_MIN_BYTES = 1 << 10  # smaller parts are sent each time: to know them costs more
_MARGIN = 0.95  # of the memory that is free

Key = tuple[int, bytes]  # how many bytes, and their digest
Region = tuple[int, int, int]  # id of the object that has the memory, address and size in it


@dataclass(slots=True)
class Place:
    """Where data are: in a file, from `position` on; and who has them in the notebook."""

    file: MemoryFile
    position: int
    owners: dict[Region, weakref.ref[object]] = field(default_factory=dict)


class KeptData:
    """What has been written for ranks, as long as an object of the notebook has it."""

    def __init__(self) -> None:
        self._places: dict[Key, Place] = {}
        self._regions: dict[Region, Key] = {}  # what each region had in it when it was last seen
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """How much memory the files take."""
        return sum(num_bytes for num_bytes, _ in list(self._places))

    def store(
        self,
        buffers: Sequence[memoryview],
        owners: Sequence[object],
        advance: Callable[[int], None] = lambda num_bytes: None,
    ) -> list[Place | None]:
        """The place of each buffer; those that are in none yet are written, to one new file.

        None of a small one. Whoever uses the places keeps them: so do the files stay, whatever
        happens to the `owners` meanwhile. What has no owner stays for those alone.

        Raises:
            TrainingError: there is not as much memory left.
        """
        with self._lock:
            keys = [_key(buffer) if buffer.nbytes >= _MIN_BYTES else None for buffer in buffers]
            new = {
                key: buffer
                for key, buffer in zip(keys, buffers, strict=True)
                if key is not None and key not in self._places
            }
            found = {key: self._places[key] for key in keys if key in self._places}
            found |= self._write(new, advance) if new else {}
            for key, buffer, owner in zip(keys, buffers, owners, strict=True):
                if key is not None and owner is not None:
                    self._watch(key, found[key], owner, _region(buffer, owner))
            return [None if key is None else found[key] for key in keys]

    def clear(self) -> None:
        """The pool has stopped: nobody maps them any more."""
        self._places.clear()
        self._regions.clear()

    def _write(
        self, new: dict[Key, memoryview], advance: Callable[[int], None]
    ) -> dict[Key, Place]:
        parts = list(new.values())
        _check_memory(sum(part.nbytes for part in parts))
        file = MemoryFile()
        write_file(file.descriptor, parts, b"", advance)
        starts = positions([part.nbytes for part in parts])
        return {key: Place(file, start) for key, start in zip(new, starts, strict=True)}

    def _watch(self, key: Key, place: Place, owner: object, region: Region) -> None:
        """Keep the place while its owner lives, and has the same there."""
        before = self._regions.get(region)
        if before == key and region in place.owners:
            return
        if before is not None:  # changed in place, or another object with this id
            self._forget(region, before)

        # The collector calls this in any thread, at any moment: no lock can be taken.
        def gone(_: object) -> None:
            if self._regions.get(region) == key:
                self._forget(region, key)

        place.owners[region] = weakref.ref(owner, gone)
        self._regions[region], self._places[key] = key, place

    def _forget(self, region: Region, key: Key) -> None:
        self._regions.pop(region, None)
        place = self._places.get(key)
        if place is not None:
            place.owners.pop(region, None)
            if not place.owners:
                self._places.pop(key, None)


def _region(buffer: memoryview, owner: object) -> Region:
    # Parts of one array may be data of their own; a storage of torch goes as a whole.
    address = np.frombuffer(buffer, np.uint8).ctypes.data if isinstance(owner, np.ndarray) else 0
    return id(owner), address, buffer.nbytes


def _key(buffer: memoryview) -> Key:
    return buffer.nbytes, xxhash.xxh3_128_digest(buffer)


def _check_memory(num_bytes: int) -> None:
    """Refuse what would have the kernel end processes: no disk has these pages."""
    free = psutil.virtual_memory().available
    limit = limits.memory_limit()
    if limit:
        free = min(free, limit - psutil.Process().memory_info().rss)
    if num_bytes > _MARGIN * free:
        raise TrainingError(
            f"the data set takes {num_bytes / 2**30:.1f} GiB once more, as the copy that all ranks "
            f"share, and {free / 2**30:.1f} GiB of memory are free. Keep the data in files that "
            "ranks map: numpy.load(path, mmap_mode='r').",
            "memory",
            "dataset",
        )
