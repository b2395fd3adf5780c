"""Data sets for tests of batches; the ranks import this, so it imports little."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, TensorDataset

from gpupool.core.errors import SampleError

DOUBLE = torch.float64


def points(num: int) -> list[Any]:
    """Points of 8 numbers in 3 classes, as `samples` of trainings has them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num, 8, generator=generator, dtype=DOUBLE)
    return list(zip(inputs, inputs[:, :3].argmax(1), strict=True))


def listed(num: int) -> TensorDataset:
    """The same as tensors."""
    inputs, targets = zip(*points(num), strict=True)
    return TensorDataset(torch.stack(inputs), torch.stack(targets))


class Points:
    """The same with an index, and with noise that torch draws."""

    def __init__(self, num: int, noise: float = 0.0) -> None:
        self.rows, self.noise = points(num), noise

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        inputs, target = self.rows[index]
        return inputs + self.noise * torch.rand(8, dtype=DOUBLE), target


class Stream(IterableDataset[Any]):
    """Points one after the other, in another order each epoch if `shuffles`."""

    def __init__(self, num: int, shuffles: bool = False, noise: float = 0.0) -> None:
        self.num, self.shuffles, self.noise, self.epoch = num, shuffles, noise, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        rows = points(self.num)
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.num, generator=generator) if self.shuffles else range(self.num)
        for place in order:
            inputs, target = rows[int(place)]
            yield inputs + self.noise * torch.rand(8, dtype=DOUBLE), target


class Sized(Stream):
    """A stream that knows how long it is."""

    def __len__(self) -> int:
        return self.num


class Unlike(Stream):
    """Gives every rank samples of its own, as other loops want it, or one rank a sample more."""

    def __init__(self, num: int, splits: bool) -> None:
        super().__init__(num)
        self.splits = splits

    def __iter__(self) -> Iterator[Any]:
        rows, rank = points(self.num), dist.get_rank()
        return iter(
            rows[rank :: dist.get_world_size()] if self.splits else rows[: rank - 1 or None]
        )


class Damaged(Stream):
    """Sample 5 cannot be read; the stream goes on after it."""

    def __iter__(self) -> Iterator[Any]:
        return _Rows(points(self.num))


class _Rows:
    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.number = rows, -1

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.number += 1
        if self.number >= len(self.rows):
            raise StopIteration
        if self.number == 5:
            raise SampleError("row 5 is damaged", "rows/5", "damaged")
        return self.rows[self.number]
