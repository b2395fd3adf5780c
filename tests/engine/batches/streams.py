"""Data sets that are walked through, for tests; the ranks import this, so it imports little."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from gpupool.core.errors import SampleError

DOUBLE = torch.float64


def points(num: int) -> list[Any]:
    """Points of 8 numbers in 3 classes, as `conftest.samples` has them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num, 8, generator=generator, dtype=DOUBLE)
    return list(zip(inputs, inputs[:, :3].argmax(1), strict=True))


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


class SplitByRank(Stream):
    """Gives every rank samples of its own, as other loops want it."""

    def __iter__(self) -> Iterator[Any]:
        rows = points(self.num)
        return iter(rows[dist.get_rank() :: dist.get_world_size()])


class LongerOnRank1(Stream):
    """One rank has a sample more."""

    def __iter__(self) -> Iterator[Any]:
        return iter(points(self.num)[: self.num - 1 + dist.get_rank()])


class Damaged(Stream):
    """Some samples cannot be read; the stream goes on after them."""

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


class Rows:
    """Rows as dicts with named columns, as Hugging Face's data sets have them."""

    def __init__(self, num: int) -> None:
        self.rows = points(num)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs, label = self.rows[index]
        return {"label": label, "image": inputs}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]
