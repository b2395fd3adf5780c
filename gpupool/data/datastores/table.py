"""Which files a data set has, millions of them: columns of numpy. Runs anywhere; no torch.

Ranks of a host share them, and no reference count of a worker process copies them page by page.

    files = Files.of((folder,), ["a/1.png", "a/2.png"], [(0, 0, 1024, 0), (0, 0, 2048, 0)])
    part = files.take(np.array([1]))
    files.read(1) == part.read(0)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupool.data.cache.cache import Cache
from gpupool.data.reading.shards import Indices
from gpupool.data.stores.interface import FileRef, Source

_ROW = np.dtype(
    [("source", np.uint32), ("version", np.uint32), ("size", np.int64), ("start", np.int64)]
)


@dataclass(frozen=True, eq=False)
class Files:
    """Files, or parts of files, of one or several sources; immutable.

    Args:
        sources: where they lie.
        rows: of each file the index of its source, 32 bits of its ETag (0 where there is none), its
            size in bytes, and where in a file of its source a part begins (0 for whole files).
        paths: of all files below their sources, as bytes, one after the other.
        ends: where in `paths` the one of each file ends.
        cache: through which they are read, if they are.
    """

    sources: tuple[Source, ...]
    rows: NDArray[Any]
    paths: NDArray[np.uint8]
    ends: NDArray[np.int64]
    cache: Cache | None = None

    @classmethod
    def of(
        cls, sources: Sequence[Source], paths: Iterable[str], rows: Iterable[tuple[int, ...]]
    ) -> Files:
        """Files by their paths and rows. Names that are no UTF-8 come back as they were."""
        # As `os.fsencode` does: names of files on Linux are bytes, not always UTF-8.
        encoded = [path.encode(errors="surrogateescape") for path in paths]
        return cls(tuple(sources), np.array(list(rows), _ROW), *_packed(encoded))

    def url(self, row: int) -> str:
        """The printable URL of a file."""
        return self.sources[int(self.rows["source"][row])].name(self._path(row))

    def num_bytes(self, row: int) -> int:
        """The size of a file, as listed."""
        return int(self.rows["size"][row])

    def read(self, row: int) -> bytes:
        """The contents of a file; raises what `Source.read` raises."""
        source, version, size, start = self.rows[row].tolist()
        where, file = self.sources[int(source)], FileRef(self._path(row), size, version)
        read = where.read if self.cache is None else partial(self.cache.read, where)
        return read(file, start, size if start else None)

    def take(self, rows: Indices) -> Files:
        """These files, in that order."""
        paths, ends = self.paths.tobytes(), self.ends[rows].tolist()
        starts = np.append(0, self.ends)[rows].tolist()
        taken = [paths[start:end] for start, end in zip(starts, ends, strict=True)]
        return Files(self.sources, self.rows[rows], *_packed(taken), self.cache)

    def join(self, other: Files) -> Files:
        """The files of both, through our cache; the same sources, as of parts of one datastore,
        are kept once."""
        sources, theirs = self.sources, other.rows
        if sources != other.sources:
            theirs = theirs.copy()
            theirs["source"] += len(sources)
            sources += other.sources
        paths = np.concatenate([self.paths, other.paths])
        ends = np.concatenate([self.ends, other.ends + len(self.paths)])
        return Files(sources, np.concatenate([self.rows, theirs]), paths, ends, self.cache)

    def _path(self, row: int) -> str:
        encoded = self.paths[self.ends[row - 1] if row else 0 : self.ends[row]]
        return encoded.tobytes().decode(errors="surrogateescape")


def _packed(paths: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    ends = np.cumsum(list(map(len, paths)), dtype=np.int64)
    return np.frombuffer(b"".join(paths), np.uint8), ends
