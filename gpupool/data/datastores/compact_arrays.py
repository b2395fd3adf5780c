"""Large arrays and many short strings, small in memory and in a pickle. Runs anywhere; no torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 16  # strings gathered at once: bounds the memory that takes
_FASTEST = 1  # zlib's level: higher ones take many times longer for a tenth less


@dataclass(frozen=True)
class PackedArray:
    """A flat array, compressed: `data` holds the lowest bytes of all values, then the next ...

    The higher bytes of neighbours are mostly equal, so they cost nearly nothing.
    """

    dtype: str
    data: bytes


def pack(array: NDArray[Any]) -> PackedArray:
    """A flat array of numbers, compressed."""
    planes = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), array.itemsize).T
    return PackedArray(array.dtype.str, zlib.compress(planes.tobytes(), _FASTEST))


def unpack(packed: PackedArray) -> NDArray[Any]:
    """The array that was packed."""
    dtype = np.dtype(packed.dtype)
    data = np.frombuffer(zlib.decompress(packed.data), np.uint8)
    planes = data.reshape(dtype.itemsize, len(data) // dtype.itemsize)
    # `view` needs the bytes of one value side by side, which the transposed array has not.
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)


class Packed:
    """A dataclass whose arrays are compressed in its pickle."""

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: pack(value) if isinstance(value, np.ndarray) else value
            for name, value in self.__dict__.items()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            (name, unpack(value) if isinstance(value, PackedArray) else value)
            for name, value in state.items()
        )


@dataclass(frozen=True, eq=False)
class Texts:
    """Strings, one after the other in one blob; string i ends at `offsets[i + 1]`.

    A million of 30 bytes take 38 MB, and 3 MB in a pickle if they are sorted paths.
    """

    blob: bytes
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """These strings. File names that are no UTF-8 come back as they were."""
        # As `os.fsencode` does: names of files on Linux are bytes, not always UTF-8.
        encoded = [text.encode(errors="surrogateescape") for text in texts]
        return cls(b"".join(encoded), _offsets(np.fromiter(map(len, encoded), np.int64)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> str:
        if not 0 <= row < len(self):
            raise IndexError(row)
        encoded = self.blob[self.offsets[row] : self.offsets[row + 1]]
        return encoded.decode(errors="surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def take(self, rows: NDArray[np.int64]) -> Texts:
        """The strings of these rows."""
        # Gathered by numpy: a million slices in a Python loop would take seconds.
        data = np.frombuffer(self.blob, np.uint8)
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        parts = []
        for first in range(0, len(rows), _CHUNK):
            part = slice(first, first + _CHUNK)
            ends = np.cumsum(lengths[part])
            # for each byte: where its string starts, and how far into it the byte is
            before = np.repeat(starts[part] - (ends - lengths[part]), lengths[part])
            parts.append(data[before + np.arange(len(before))].tobytes())
        return Texts(b"".join(parts), _offsets(lengths))

    def join(self, other: Texts) -> Texts:
        """The strings of both."""
        offsets = np.concatenate([self.offsets, other.offsets[1:] + len(self.blob)])
        return Texts(self.blob + other.blob, offsets)

    def __getstate__(self) -> tuple[bytes, PackedArray]:
        # Lengths are small and alike, so they compress; offsets do not.
        return zlib.compress(self.blob, _FASTEST), pack(np.diff(self.offsets))

    # The dataclass is frozen, which `__dict__` is not.
    def __setstate__(self, state: tuple[bytes, PackedArray]) -> None:
        self.__dict__.update(blob=zlib.decompress(state[0]), offsets=_offsets(unpack(state[1])))


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
