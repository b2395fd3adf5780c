"""A data set of the user's, read a batch at a time. Runs on engines and in their workers; torch.

    rows = Rows(dataset)
    batch = rows.batch(np.array([3, 1, 4]), Reading(draw=Draw(0, 1)))

What a sample draws from torch, numpy and Python's `random` depends on (seed, epoch, index) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import TensorDataset

from gpupool.core.errors import SampleError
from gpupool.data.reading.augmentation import generators, restore, seeded
from gpupool.data.reading.collate import Batch, Collate, batch_of
from gpupool.data.reading.samples import Draw, Samples, Skipped, numbered
from gpupool.data.reading.shards import Indices
from gpupool.data.reading.trees import pinned

Keyed = Callable[[Draw | None, int], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Reading:
    """How batches are read.

    `draw` keys the random numbers of augmentation; `skip` leaves out samples that cannot be read.
    `collate` is the user's function that makes a batch; `depth` batches are read ahead.
    """

    draw: Draw | None = None
    skip: bool = False
    collate: Collate | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    depth: int = 2

    @property
    def pin(self) -> bool:
        """Whether batches lie in memory that a GPU can copy from while it computes."""
        return self.device.type == "cuda"


class Rows:
    """A map-style data set, whose samples `batch` reads in this thread, one after the other.

    An index may be k times its length larger: that is a sample which comes for the (k + 1)th time,
    with random numbers of its own.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._is_ours = isinstance(dataset, Samples)
        self._num = len(dataset) if hasattr(dataset, "__len__") else 0

    def batch(self, indices: Indices, reading: Reading) -> Batch | None:
        """The samples as a batch; None if there are none.

        What it draws leaves the generators where they were.
        """
        if len(indices) == 0:
            return None
        if is_table(self.dataset) and reading.collate is None:
            # what collating row by row comes to, in one go
            at = torch.tensor(indices, device="cpu")
            halves = [tensor[at] for tensor in self.dataset.tensors]
            inputs, targets = pinned(halves) if reading.pin else halves
            return Batch(inputs, targets, len(indices))
        before = generators() if reading.draw is not None else b""
        try:
            samples = [self._sample(place, reading) for place in indices.tolist()]
            return made(samples, indices, reading)
        finally:
            if before:
                restore(before)

    def _sample(self, place: int, reading: Reading) -> Any:
        row = place % self._num if self._num else place
        try:
            with seeded(reading.draw, place):
                if not self._is_ours:
                    return self.dataset[row]
                draw = numbered(reading.draw, place // self._num)
                return self.dataset.decode(row, self.dataset.fetch(row), draw)
        except SampleError as error:
            if not reading.skip:
                raise
            return Skipped.of(error)


def made(
    samples: Sequence[Any], indices: Indices, reading: Reading, keyed: Keyed = seeded
) -> Batch:
    """The batch of samples; what a `collate` draws, the first index keys."""
    draw = None if reading.collate is None else reading.draw
    with keyed(draw, -1 - int(indices[0])):  # no sample's own
        return batch_of(samples, reading.pin, reading.collate, indices)


def is_table(dataset: Any) -> bool:
    """Whether rows are taken out of two tensors in memory, which draws nothing."""
    return type(dataset) is TensorDataset and len(dataset.tensors) == 2
