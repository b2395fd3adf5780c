"""Which files a data set has, millions of them: columns of numpy. Runs anywhere; no torch.

Ranks of a host share them, and no reference count of a worker process copies them page by page.

    files = Files.of((folder,), [(0, 0, 1024, 0, "a/1.png"), (0, 0, 2048, 0, "a/2.png")])
    part = files.take(np.array([1]))
    files.read(1) == part.read(0)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupool.data.reading.shards import Indices
from gpupool.data.stores.cache import Cache
from gpupool.data.stores.folder import FileRef, Source

Row = tuple[int, int, int, int, str]  # as in `Files.rows`
_COLUMNS = [("source", "u4"), ("version", "u4"), ("size", "i8"), ("start", "i8")]


@dataclass(frozen=True, eq=False)
class Files:
    """Files, or parts of files, of one or several sources; immutable.

    Args:
        sources: where they lie.
        rows: of each file the index of its source, 32 bits of its ETag (0 where there is none), its
            size in bytes, where in a file of its source a part begins (0 for whole files), and its
            path below its source, as bytes.
        cache: through which they are read, if they are.
    """

    sources: tuple[Source, ...]
    rows: NDArray[Any]
    cache: Cache | None = None

    @classmethod
    def of(cls, sources: Sequence[Source], rows: Iterable[Row]) -> Files:
        """Files by their rows. Names that are no UTF-8 come back as they were."""
        # As `os.fsencode` does: names of files on Linux are bytes, not always UTF-8.
        encoded = [(*row[:-1], row[-1].encode(errors="surrogateescape")) for row in rows]
        width = max((len(row[-1]) for row in encoded), default=1)
        return cls(tuple(sources), np.array(encoded, [*_COLUMNS, ("path", f"S{width}")]))

    def url(self, row: int) -> str:
        """The printable URL of a file."""
        return self.sources[int(self.rows["source"][row])].name(self._path(row))

    def read(self, row: int) -> bytes:
        """The contents of a file; raises what `Source.read` raises."""
        number, version, size, start, _ = self.rows[row].tolist()
        source, file = self.sources[number], FileRef(self._path(row), size, version)
        read = source.read if self.cache is None else partial(self.cache.read, source)
        return read(file, start, size if start else None)

    def take(self, rows: Indices) -> Files:
        """These files, in that order."""
        return replace(self, rows=self.rows[rows])

    def _path(self, row: int) -> str:
        path: bytes = self.rows["path"][row]
        return path.decode(errors="surrogateescape")
