"""torch's Subset and ConcatDataset of data sets of ours, read as those are. Runs anywhere; torch.

They hide that their samples can be fetched many at once, what keys the random numbers of a sample,
and the normalization of its batches.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from gpupool.core.errors import DataError
from gpupool.data.reading.normalization import Normalization
from gpupool.data.reading.samples import Draw, InParts, Samples, numbered


def opened(dataset: Any) -> Any:
    """A `Samples` for a Subset or ConcatDataset of such, also nested; anything else as it is."""
    if type(dataset) not in (Subset, ConcatDataset):
        return dataset
    return Nested(dataset) if all(isinstance(one, Samples) for one in parts(dataset)) else dataset


def parts(dataset: Any) -> list[Any]:
    """The data sets that a sample of this one may be of, with `leaf`."""
    # Not of derived classes, which may change what a sample is.
    if type(dataset) is Subset:
        return parts(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return [leaf for part in dataset.datasets for leaf in parts(part)]
    return [dataset]


def leaf(dataset: Any, index: int, draw: Draw | None = None) -> tuple[Any, int, Draw | None]:
    """Of which data set a sample is, where there, and what keys its random numbers.

    Those of the same row of two parts differ.
    """
    while True:
        if type(dataset) is Subset:
            dataset, index = dataset.dataset, int(dataset.indices[index])
        elif type(dataset) is ConcatDataset:
            number = bisect_right(dataset.cumulative_sizes, index)
            index -= dataset.cumulative_sizes[number - 1] if number else 0
            dataset, draw = dataset.datasets[number], numbered(draw, number)
        else:
            return dataset, index, draw


@dataclass(frozen=True, eq=False)
class Nested(InParts):
    """A `Samples` of a Subset or ConcatDataset."""

    whole: Any

    @property
    def normalization(self) -> Normalization | None:
        """That of the parts. Raises DataError if they differ in it."""
        asked = {getattr(part, "normalization", None) for part in parts(self.whole)}
        if len(asked) > 1:
            raise DataError(
                "the parts of a ConcatDataset have another normalization each; give them the same "
                "by with_normalization",
                "other settings",
            )
        return asked.pop()

    def __len__(self) -> int:
        return len(self.whole)

    def fetch(self, index: int) -> Any:
        """What the part fetches."""
        part, row, _ = leaf(self.whole, index)
        return part.fetch(row)

    def decode(self, index: int, fetched: Any, draw: Draw | None) -> tuple[Any, Any]:
        """What the part decodes."""
        part, row, own = leaf(self.whole, index, draw)
        made: tuple[Any, Any] = part.decode(row, fetched, own)
        return made
