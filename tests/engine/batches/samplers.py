"""Batch samplers and data sets to be drawn from; the ranks import this, so it imports little."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


class Points:
    """Points of 8 numbers in 3 classes, with noise that torch draws."""

    def __init__(self, num: int, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num, 8, generator=generator, dtype=torch.float64)
        self.targets = self.inputs[:, :3].argmax(1)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        noise = self.noise * torch.rand(8, dtype=torch.float64)
        return self.inputs[index] + noise, self.targets[index]


class ByEpoch:
    """Batches of uneven size, in another order each epoch; without len()."""

    def __init__(self, num: int, sizes: tuple[int, ...]) -> None:
        self.num, self.sizes, self.epoch = num, sizes, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.num, generator=torch.Generator().manual_seed(self.epoch))
        return iter([part.tolist() for part in order.split(list(self.sizes))])


class Endless:
    """Never ends."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [3, 1, 4]


class ByRank(ByEpoch):
    """Splits itself by rank, as a DistributedSampler does."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__())[dist.get_rank() :: dist.get_world_size()])
