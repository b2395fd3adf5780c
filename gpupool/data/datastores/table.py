"""Which files a data set has, millions of them: columns of numpy. Runs anywhere; no torch.

Ranks of a host share them, and no reference count of a worker process copies them page by page.

    files = Files.of(folder, listing.files)
    part = files.take(np.array([5, 2]))
    files.read(5) == part.read(0)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gpupool.data.reading.shards import Indices
from gpupool.data.stores.interface import FileInfo, FileRef, Source


@dataclass(frozen=True, eq=False)
class Texts:
    """Strings, one after the other in one blob; string i ends at `ends[i]`."""

    blob: NDArray[np.uint8]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """These strings. File names that are no UTF-8 come back as they were."""
        # As `os.fsencode` does: names of files on Linux are bytes, not always UTF-8.
        return cls._of([text.encode(errors="surrogateescape") for text in texts])

    @classmethod
    def _of(cls, encoded: list[bytes]) -> Texts:
        ends = np.cumsum(list(map(len, encoded)), dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __getitem__(self, row: int) -> str:
        encoded = self.blob[self.ends[row - 1] if row else 0 : self.ends[row]]
        return encoded.tobytes().decode(errors="surrogateescape")

    def take(self, rows: Indices) -> Texts:
        """The strings of these rows."""
        blob, ends = self.blob.tobytes(), self.ends[rows].tolist()
        starts = np.append(0, self.ends)[rows].tolist()
        return Texts._of([blob[start:end] for start, end in zip(starts, ends, strict=True)])

    def join(self, other: Texts) -> Texts:
        """The strings of both."""
        ends = np.concatenate([self.ends, other.ends + len(self.blob)])
        return Texts(np.concatenate([self.blob, other.blob]), ends)


@dataclass(frozen=True, eq=False)
class Files:
    """Files, or parts of files, of one or several sources; immutable.

    Args:
        sources: where they lie.
        paths: of each file, below its source.
        rows: of each file the index of its source, 32 bits of its ETag (0 where there is none), its
            size in bytes, and where in a file of its source a part begins (0 for whole files).
    """

    ROW: ClassVar[Any] = np.dtype(
        [("source", np.uint32), ("version", np.uint32), ("size", np.int64), ("start", np.int64)]
    )

    sources: tuple[Source, ...]
    paths: Texts
    rows: NDArray[Any]

    @classmethod
    def of(cls, source: Source, files: Sequence[FileInfo]) -> Files:
        """The files of a listing, in its order."""
        rows = [(0, file.version, file.size, 0) for file in files]
        return cls((source,), Texts.of(file.path for file in files), np.array(rows, cls.ROW))

    @property
    def has_versions(self) -> bool:
        """Whether their store has ETags."""
        return bool(self.rows["version"].any())

    def url(self, row: int) -> str:
        """The printable URL of a file."""
        return self.sources[int(self.rows["source"][row])].name(self.paths[row])

    def num_bytes(self, row: int) -> int:
        """The size of a file, as listed."""
        return int(self.rows["size"][row])

    def read(self, row: int) -> bytes:
        """The contents of a file; raises what `Source.read` raises."""
        source, version, size, start = self.rows[row].tolist()
        file = FileRef(self.paths[row], size, version)
        return self.sources[int(source)].read(file, start, size if start else None)

    def take(self, rows: Indices) -> Files:
        """These files, in that order."""
        return Files(self.sources, self.paths.take(rows), self.rows[rows])

    def join(self, other: Files) -> Files:
        """The files of both; the same sources, as of parts of one datastore, are kept once."""
        sources, theirs = self.sources, other.rows
        if sources != other.sources:
            theirs = theirs.copy()
            theirs["source"] += len(sources)
            sources += other.sources
        return Files(sources, self.paths.join(other.paths), np.concatenate([self.rows, theirs]))
