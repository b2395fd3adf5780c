"""Samples that draw from numpy and `random` are the same on any ranks and by any `workers`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpupool import TrainingResult
from tests.engine.training.vectors import DOUBLE, Points
from tests.support.pools import Pools
from tests.support.trainings import network, train_on, weights


class Augmented(Points):
    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs + torch.from_numpy(np.random.normal(size=8)) + random.gauss(0, 1), target


def collated(rows: list[Any]) -> Any:
    inputs, targets = zip(*rows, strict=True)
    return torch.stack(inputs) + 0.1 * np.random.rand() + random.random(), torch.stack(targets)


def train(pools: Pools, n: int, **settings: Any) -> TrainingResult:
    common = {"batch_size": 12, "lr": 0.05, "epochs": 3, "keep": "last"}
    return train_on(pools[n], network(DOUBLE), Augmented(50, noise=1.0), **common | settings)


def test_on_any_ranks_to_1e_12_and_by_any_workers_bitwise(pools: Pools) -> None:
    results = {n: train(pools, n) for n in (1, 2, 3)}
    for n in (2, 3):
        assert results[n].history.loss == pytest.approx(results[1].history.loss, abs=1e-12)
        assert (weights(results[n].model) - weights(results[1].model)).abs().max() < 1e-12
    for workers in (0, 2):
        same = train(pools, 2, workers=workers)
        assert same.history.loss == results[2].history.loss
        assert torch.equal(weights(same.model), weights(results[2].model))
    assert train(pools, 2, seed=1).history.loss != results[2].history.loss
    assert results[1].history.reads.read_by


def test_a_resumed_one_is_bitwise_the_one_that_went_on(pools: Pools, tmp_path: Path) -> None:
    whole = train(pools, 2, collate=collated)
    kept = {"checkpoint": str(tmp_path), "checkpoint_every": 2, "collate": collated}
    train(pools, 2, max_steps=6, **kept)
    resumed = train(pools, 2, resume=True, **kept)
    assert resumed.history.loss[-6:] == whole.history.loss[-6:]
    assert torch.equal(weights(resumed.model), weights(whole.model))
