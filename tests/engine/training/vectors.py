"""Data sets and networks with known outputs, and a training by hand; the ranks import this."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from gpupool.core.errors import SampleError
from gpupool.data.reading.augmentation import keyed_draws
from gpupool.data.reading.samples import Draw
from gpupool.data.reading.shards import Indices
from gpupool.data.stores.retry import counts
from tests.support.trainings import samples, weights

DOUBLE = torch.float64


class Vectors:
    """A data set in two parts: vectors in 3 classes, of which some cannot be read."""

    def __init__(self, num: int, bad: set[int], noise: float = 0.0) -> None:
        self.inputs, self.targets = samples(num, DOUBLE).tensors
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
    def epoch_order(self, seed: int, epoch: int, batch_size: int) -> Indices:
        return np.arange(len(self))[::-1].copy()


class Points:
    """The same vectors as a data set of a user's own, with noise that torch draws."""

    def __init__(self, num: int, noise: float = 0.0) -> None:
        self.rows, self.noise = samples(num, DOUBLE), noise

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        inputs, target = self.rows[index]
        return inputs + self.noise * torch.rand(8, dtype=DOUBLE), target


class Stream(IterableDataset[Any]):
    """The same one after the other, in another order each epoch if `shuffles`."""

    def __init__(self, num: int, shuffles: bool = False, noise: float = 0.0) -> None:
        self.num, self.shuffles, self.noise, self.epoch = num, shuffles, noise, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        points, generator = Points(self.num, self.noise), torch.Generator()
        generator.manual_seed(self.epoch)
        order = torch.randperm(self.num, generator=generator) if self.shuffles else range(self.num)
        yield from (points[int(place)] for place in order)


class Unlike(Stream):
    """Gives every rank samples of its own, as other loops want it, or one rank a sample more."""

    def __init__(self, num: int, splits: bool) -> None:
        super().__init__(num)
        self.splits = splits

    def __iter__(self) -> Iterator[Any]:
        points, rank = list(super().__iter__()), dist.get_rank()
        return iter(
            points[rank :: dist.get_world_size()] if self.splits else points[: rank - 1 or None]
        )


class Table(nn.Module):
    """Gives the row whose number it gets: of a tensor, or of each in a dict."""

    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, number: Tensor) -> Any:
        if isinstance(self.rows, dict):
            return {name: rows[number.long()] for name, rows in self.rows.items()}
        return self.rows[number.long()]


class Targets(Dataset[Any]):
    def __init__(self, **targets: Tensor) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return min(map(len, self.targets.values()))

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index)), {n: t[index] for n, t in self.targets.items()}


def is_sure(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of samples of which a class is likelier than all others together."""
    return (outputs.softmax(1).amax(1) > 0.5).double().mean()


def by_hand(
    model: nn.Module, rows: Any, collate: Any, loss: Callable[[Any], Tensor], settings: Any
) -> Tensor:
    """The weights after the same steps in plain torch, with whole batches."""
    trained, size = [p for p in model.parameters() if p.requires_grad], settings["batch_size"]
    optimizer = torch.optim.SGD(trained, settings["lr"], momentum=0.9)
    for _ in range(settings["epochs"]):
        for start in range(0, len(rows), size):
            optimizer.zero_grad()
            loss(collate([rows[i] for i in range(start, min(start + size, len(rows)))])).backward()
            optimizer.step()
    return weights(model)
