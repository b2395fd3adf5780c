"""Data sets in two parts for tests of training; the ranks import this, so it imports little."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gpupool.core.errors import SampleError
from gpupool.data.reading.augmentation import keyed_draws
from gpupool.data.reading.samples import Draw
from gpupool.data.reading.shards import Indices
from gpupool.data.stores.retry import counts

DOUBLE = torch.float64


class Vectors:
    """A data set in two parts: vectors in 3 classes, of which some cannot be read."""

    def __init__(self, num: int, bad: set[int], noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num, 8, generator=generator, dtype=DOUBLE)
        self.targets = self.inputs[:, :3].argmax(1)
        self.bad, self.noise = bad, noise

    def __len__(self) -> int:
        return len(self.inputs)

    def num_bytes(self, index: int) -> int:
        return 64

    def fetch(self, index: int) -> Tensor:
        counts.add(reads=1, retries=index % 2, reason="503 SlowDown")
        return self.inputs[index]

    def decode(self, index: int, fetched: Tensor, draw: Draw | None) -> tuple[Tensor, Tensor]:
        if index in self.bad:
            raise SampleError(f"vector {index} is damaged", f"vectors/{index}", "damaged")
        with keyed_draws(draw, index):
            return fetched + self.noise * torch.rand(8, dtype=DOUBLE), self.targets[index]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.decode(index, self.fetch(index), None)


class Backwards(Vectors):
    """Orders its own epochs."""

    def epoch_order(self, seed: int, epoch: int, batch_size: int) -> Indices:
        return np.arange(len(self))[::-1].copy()
