"""Small data, small networks, and a way to train on any pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from gpupool import Pool, TrainingOptions, TrainingResult, TrainingRun
from gpupool.core.wire.requests import Counts
from gpupool.training.head import require_module
from tests.support.processes import until

DEADLINE_S = 60.0


def samples(num: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> TensorDataset:
    """`num` points of 8 numbers in 3 classes that a small network can tell apart."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num, 8, generator=generator, dtype=dtype)
    targets = inputs[:, :3].argmax(1)
    return TensorDataset(inputs, targets)


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A small network without batch norm, whose result does not depend on the number of ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def train_on(pool: Pool, model: nn.Module, dataset: Any, **settings: Any) -> TrainingResult:
    require_module(model)
    loss = settings.pop("loss", "cross_entropy")
    validation = settings.pop("validation", None)
    options = TrainingOptions(**settings)
    return TrainingRun(pool, model, dataset, loss, options, validation).result()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


_ONE_BY_ONE = threading.Lock()


class Slow(Dataset[Any]):
    """Samples that take their time, so that a test can act while training goes on."""

    def __init__(self, num: int, delay_s: float, dtype: torch.dtype = torch.float32) -> None:
        self.samples, self.delay_s = samples(num, dtype), delay_s

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        with _ONE_BY_ONE:  # else many threads would wait at once
            time.sleep(self.delay_s)
        return self.samples[index]


class Held(Dataset[Any]):
    """Each rank reads `num_free` samples, and the others once the file `opens` is there."""

    def __init__(
        self, num: int, opens: Path, num_free: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        self.samples, self.opens, self.num_free = samples(num, dtype), opens, num_free
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        if self.num_read > self.num_free:
            wait_until(self.opens.exists)
        return self.samples[index]


class Images:
    """A data set in two parts: image i is all `brightness` * i, of class i % 2, and is to be
    normalized."""

    normalization = ((0.5,), (0.25,))
    classes = ["<i>even", "odd"]

    def __init__(self, brightness: int = 1, shape: tuple[int, ...] = (1, 2, 4)) -> None:
        self.brightness, self.shape = brightness, shape

    def __len__(self) -> int:
        return 21

    def num_bytes(self, index: int) -> int:
        return 8

    def fetch(self, index: int) -> int:
        return index

    def decode(self, index: int, fetched: int, draw: object) -> tuple[Tensor, int]:
        return torch.full(self.shape, self.brightness * fetched, dtype=torch.uint8), index % 2

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.decode(index, index, None)


class Centred(nn.Module):
    """Takes a running mean away; each new one is put in the place of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
            self.batches = self.batches + 1
        return inputs - self.mean


def wait_until_heard(pool: Pool) -> None:
    for answer in pool.engines.control(Counts(), range(pool.world_size)).values():
        assert answer.result(DEADLINE_S).status == "ok"


def wait_until(condition: Callable[[], bool]) -> None:
    until(condition, DEADLINE_S)
