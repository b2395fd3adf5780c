"""torch's Subset and ConcatDataset of data sets of ours, read as those are. Runs anywhere; torch.

They hide that their samples can be fetched many at once, what keys the random numbers of a sample,
and the normalization of its batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from gpupool.core.errors import DataError
from gpupool.data.reading.normalization import Normalization
from gpupool.data.reading.samples import Draw, Samples
from gpupool.data.reading.shards import Indices


def opened(dataset: Any) -> Any:
    """A `Samples` for a Subset or ConcatDataset of such, also nested; anything else as it is."""
    if type(dataset) is Subset:
        whole = opened(dataset.dataset)
        if isinstance(whole, Samples):
            return Nested((whole,), np.asarray(dataset.indices, np.int64))
    # Not of derived classes, which may change what a sample is.
    if type(dataset) is ConcatDataset:
        parts = tuple(map(opened, dataset.datasets))
        if all(isinstance(part, Samples) for part in parts):
            return Nested(parts, np.arange(len(dataset)))
    return dataset


def again(dataset: Any) -> Any:
    """The data set for an epoch in which a sample may come more than once.

    Its sample i + k * len(dataset) is sample i when it comes for the (k + 1)th time, with random
    numbers of augmentation of its own.
    """
    dataset = opened(dataset)
    return _SamplesAgain(dataset) if isinstance(dataset, Samples) else _Again(dataset)


@dataclass(frozen=True, eq=False)
class _Again:
    """What keys the random numbers of a data set of the user's is the index that is asked for."""

    part: Any

    def __getattr__(self, name: str) -> Any:
        if name == "part":  # asked for while it is unpickled
            raise AttributeError(name)
        found = getattr(self.part, name)
        if name == "__getitems__":
            return lambda indices: found([index % len(self.part) for index in indices])
        return found

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int) -> Any:
        return self.part[index % len(self.part)]


class _SamplesAgain(_Again):
    """A `Samples`."""

    def num_bytes(self, index: int) -> int:
        """About how many bytes `fetch` holds."""
        return int(self.part.num_bytes(index % len(self.part)))

    def fetch(self, index: int) -> Any:
        """What the data set fetches."""
        return self.part.fetch(index % len(self.part))

    def decode(self, index: int, fetched: Any, draw: Draw | None) -> Any:
        """What the data set decodes, with other random numbers each time."""
        number, row = divmod(index, len(self.part))
        return self.part.decode(row, fetched, _own(draw, number))


@dataclass(frozen=True, eq=False)
class Nested:
    """A `Samples`: sample i is sample `rows[i]` of all `parts`, one after the other."""

    parts: tuple[Any, ...]
    rows: Indices

    @property
    def normalization(self) -> Normalization | None:
        """That of the parts. Raises DataError if they differ in it."""
        asked: set[Normalization | None] = {
            getattr(part, "normalization", None) for part in self.parts
        }
        if len(asked) > 1:
            raise DataError(
                "the parts of a ConcatDataset have another normalization each; give them the same "
                "by with_normalization",
                "other settings",
            )
        return asked.pop()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.decode(index, self.fetch(index), None)

    def num_bytes(self, index: int) -> int:
        """About how many bytes `fetch` holds."""
        number, row = self._place(index)
        return int(self.parts[number].num_bytes(row))

    def fetch(self, index: int) -> Any:
        """What the part fetches."""
        number, row = self._place(index)
        return self.parts[number].fetch(row)

    def decode(self, index: int, fetched: Any, draw: Draw | None) -> tuple[Any, Any]:
        """What the part decodes; the random numbers of the same row of two parts are others."""
        number, row = self._place(index)
        made: tuple[Any, Any] = self.parts[number].decode(row, fetched, _own(draw, number))
        return made

    def _place(self, index: int) -> tuple[int, int]:
        """Which part, and which row of it."""
        row = int(self.rows[index])
        # One after the other: parts are few.
        for number, part in enumerate(self.parts):
            if row < len(part):
                return number, row
            row -= len(part)
        raise IndexError(index)


def _own(draw: Draw | None, number: int) -> Draw | None:
    """What keys the random numbers of a part."""
    if draw is None or not number:
        return draw
    return Draw(draw.key(number), draw.epoch, draw.keys_all)
