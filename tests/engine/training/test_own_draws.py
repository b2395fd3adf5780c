"""Samples that draw from numpy and `random` are the same on any ranks and by any `workers`."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset

from gpupool import TrainingOptions, TrainingResult, TrainingRun
from tests.engine.training.vectors import DOUBLE, Points
from tests.support.pools import Pools
from tests.support.processes import until
from tests.support.trainings import DEADLINE_S, network, train_on, weights


class Augmented(Points):
    """Samples with numbers of numpy, Python and torch added."""

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs + torch.from_numpy(np.random.normal(size=8)) + random.gauss(0, 1), target


def collated(rows: list[Any]) -> Any:
    """Pairs, the numbers of a batch moved by some that are drawn for all of them."""
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


class Computing(Dataset[Any]):
    """Samples that hold Python's lock, so that processes read them."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        sum(range(50_000))
        return torch.full((8,), 1.0 + index % 3, dtype=DOUBLE), index % 3


@pytest.mark.long
def test_a_stop_while_processes_read_keeps_the_network_and_ends_them(pools: Pools) -> None:
    pool, options = pools[2], TrainingOptions(workers=2, batch_size=16, epochs=3)
    found = pool.run(os.getpid)
    run = TrainingRun(pool, network(DOUBLE), Computing(), "cross_entropy", options, None)
    try:
        until(lambda: "worker" in run.history.reads.read_by, DEADLINE_S, "workers")
    finally:
        run.stop()
    result = run.result()
    assert result.stopped_by == "user"
    assert weights(result.model).isfinite().all()
    ranks = [psutil.Process(found[rank]) for rank in (0, 1)]
    until(lambda: not any(rank.children() for rank in ranks), DEADLINE_S, "the end of processes")
