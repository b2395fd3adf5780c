"""Pools of 1, 2 and 3 ranks side by side, small data, and a way to train on any of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gpupool import Pool, PoolOptions, TrainingOptions, TrainingResult, TrainingRun
from gpupool.training.head import require_module


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Real pools by their number of ranks."""
    made = {n: Pool(PoolOptions(n=n, device="cpu")) for n in (1, 2, 3)}
    yield made
    for pool in made.values():
        pool.stop()


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
    """Train on this pool; options and arguments of `TrainingRun` by name."""
    require_module(model)
    loss = settings.pop("loss", "cross_entropy")
    validation = settings.pop("validation", None)
    options = TrainingOptions(**settings)
    return TrainingRun(pool, model, dataset, loss, options, validation).result()


def weights(model: nn.Module) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
