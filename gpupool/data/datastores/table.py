"""Which files a data set has, millions of them: columns of numpy. Runs anywhere; no torch.

They are small in memory and in a pickle, and no reference count of a worker process copies them
page by page.

    files = Files.of(folder, listing.files)
    part = files.take(np.array([5, 2]))
    files.read(5) == part.read(0)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpupool.data.reading.shards import Indices
from gpupool.data.stores.interface import FileInfo, FileRef, Source

_FASTEST = 1  # zlib's level: higher ones take many times longer for a tenth less


class Items(Protocol):
    """What a datastore reads, one for each sample: `Files`, or pairs of them. Immutable."""

    @property
    def sources(self) -> tuple[Source, ...]: ...

    @property
    def has_versions(self) -> bool: ...

    def __len__(self) -> int: ...

    def url(self, row: int) -> str: ...

    def num_bytes(self, row: int) -> int: ...

    def read(self, row: int) -> Any: ...

    def take(self, rows: Indices) -> Self: ...

    def join(self, other: Self) -> Self: ...

    def through(self, wrap: Callable[[Source], Source]) -> Self: ...


ItemsT = TypeVar("ItemsT", bound=Items)


class _Packed(NamedTuple):
    dtype: Any
    data: bytes

    @classmethod
    def of(cls, column: NDArray[Any]) -> _Packed:
        """The lowest bytes of all values, then the next ...: the higher ones are mostly equal."""
        planes = np.ascontiguousarray(column).view(np.uint8).reshape(-1, column.itemsize).T
        return cls(column.dtype, zlib.compress(planes.tobytes(), _FASTEST))

    def column(self) -> NDArray[Any]:
        data = np.frombuffer(zlib.decompress(self.data), np.uint8)
        # `view` needs the bytes of one value side by side.
        values = np.ascontiguousarray(data.reshape(self.dtype.itemsize, -1).T)
        column: NDArray[Any] = values.view(self.dtype).ravel()
        return column


class Packed:
    """An object whose columns are compressed in its pickle."""

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: _Packed.of(value) if isinstance(value, np.ndarray) else value
            for name, value in self.__dict__.items()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # `__dict__`, as a dataclass may be frozen.
        self.__dict__.update(
            (name, value.column() if isinstance(value, _Packed) else value)
            for name, value in state.items()
        )


@dataclass(frozen=True, eq=False)
class Texts:
    """Strings, one after the other in one blob; string i ends at `offsets[i + 1]`."""

    blob: bytes
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """These strings. File names that are no UTF-8 come back as they were."""
        # As `os.fsencode` does: names of files on Linux are bytes, not always UTF-8.
        return cls._of([text.encode(errors="surrogateescape") for text in texts])

    @classmethod
    def _of(cls, encoded: list[bytes]) -> Texts:
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return cls(b"".join(encoded), _offsets(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> str:
        encoded = self.blob[self.offsets[row] : self.offsets[row + 1]]
        return encoded.decode(errors="surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def take(self, rows: Indices) -> Texts:
        """The strings of these rows."""
        blob, ends = self.blob, self.offsets[rows + 1].tolist()
        starts = self.offsets[rows].tolist()
        return Texts._of([blob[start:end] for start, end in zip(starts, ends, strict=True)])

    def join(self, other: Texts) -> Texts:
        """The strings of both."""
        offsets = np.concatenate([self.offsets, other.offsets[1:] + len(self.blob)])
        return Texts(self.blob + other.blob, offsets)

    def __getstate__(self) -> tuple[bytes, _Packed]:
        # Lengths are small and alike, so they compress; offsets do not.
        return zlib.compress(self.blob, _FASTEST), _Packed.of(np.diff(self.offsets))

    def __setstate__(self, state: tuple[bytes, _Packed]) -> None:
        offsets = _offsets(state[1].column())
        self.__dict__.update(blob=zlib.decompress(state[0]), offsets=offsets)


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


@dataclass(frozen=True, eq=False)
class Files(Packed):
    """Files, or parts of files, of one or several sources: `Items`.

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

    def __len__(self) -> int:
        return len(self.rows)

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

    def through(self, wrap: Callable[[Source], Source]) -> Files:
        """The same files, read through what `wrap` makes of each source."""
        return replace(self, sources=tuple(map(wrap, self.sources)))
