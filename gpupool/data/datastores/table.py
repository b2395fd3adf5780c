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
from typing import Any, NamedTuple, Protocol, Self, TypeVar

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
    dtype: str
    data: bytes

    @classmethod
    def of(cls, column: NDArray[Any]) -> _Packed:
        """The lowest bytes of all values, then the next ...: the higher ones are mostly equal."""
        planes = np.ascontiguousarray(column).view(np.uint8).reshape(-1, column.itemsize).T
        return cls(column.dtype.str, zlib.compress(planes.tobytes(), _FASTEST))

    def column(self) -> NDArray[Any]:
        dtype = np.dtype(self.dtype)
        planes = np.frombuffer(zlib.decompress(self.data), np.uint8).reshape(dtype.itemsize, -1)
        # `view` needs the bytes of one value side by side.
        return np.ascontiguousarray(planes.T).view(dtype).ravel()


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
        source_of: index into `sources`.
        sizes: in bytes.
        versions: 32 bits of each ETag, 0 where there is none.
        starts: where in its source's file a part begins; 0 for whole files.
    """

    sources: tuple[Source, ...]
    paths: Texts
    source_of: NDArray[np.uint32]
    sizes: NDArray[np.int64]
    versions: NDArray[np.uint32]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, source: Source, files: Sequence[FileInfo]) -> Files:
        """The files of a listing, in its order."""
        number = len(files)
        return cls(
            (source,),
            Texts.of(file.path for file in files),
            np.zeros(number, np.uint32),
            np.fromiter((file.size for file in files), np.int64, number),
            np.fromiter((file.version for file in files), np.uint32, number),
            np.zeros(number, np.int64),
        )

    @property
    def has_versions(self) -> bool:
        """Whether their store has ETags."""
        return bool(self.versions.any())

    def __len__(self) -> int:
        return len(self.sizes)

    def url(self, row: int) -> str:
        """The printable URL of a file."""
        return self._source(row).name(self.paths[row])

    def num_bytes(self, row: int) -> int:
        """The size of a file, as listed."""
        return int(self.sizes[row])

    def read(self, row: int) -> bytes:
        """The contents of a file; raises what `Source.read` raises."""
        file = FileRef(self.paths[row], int(self.sizes[row]), int(self.versions[row]))
        if start := int(self.starts[row]):
            return self._source(row).read(file, start, file.size)
        return self._source(row).read(file)

    def take(self, rows: Indices) -> Files:
        """These files, in that order."""
        columns = {name: column[rows] for name, column in self._columns().items()}
        return Files(self.sources, self.paths.take(rows), **columns)

    def join(self, other: Files) -> Files:
        """The files of both; the same sources, as of parts of one datastore, are kept once."""
        theirs, sources = other._columns(), self.sources
        if sources != other.sources:
            theirs["source_of"] = theirs["source_of"] + np.uint32(len(sources))
            sources += other.sources
        columns = {
            name: np.concatenate([column, theirs[name]]) for name, column in self._columns().items()
        }
        return Files(sources, self.paths.join(other.paths), **columns)

    def through(self, wrap: Callable[[Source], Source]) -> Files:
        """The same files, read through what `wrap` makes of each source."""
        return replace(self, sources=tuple(map(wrap, self.sources)))

    def _source(self, row: int) -> Source:
        return self.sources[int(self.source_of[row])]

    def _columns(self) -> dict[str, NDArray[Any]]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
