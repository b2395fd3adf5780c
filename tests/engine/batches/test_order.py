"""Weights: which samples are in which batch, exactly, on any ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import gpupool
from gpupool import OptionsError, SpmdError, TrainingOptions
from gpupool.core.options import datasets as sampling
from gpupool.engine.batches.order import epoch_batches
from gpupool.engine.batches.shares import epoch_shares
from gpupool.engine.group.forming import World
from tests.engine.batches.points import Points
from tests.engine.batches.streams import Stream
from tests.engine.training.vectors import Backwards
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on, weights

DOUBLE = torch.float64
NUM = 50
HEAVY = [0.0 if i < 10 else 1.0 + i % 3 for i in range(NUM)]
ALONE = World(0, 1, torch.device("cpu"))
ORDERS: dict[str, dict[str, Any]] = {
    "plain": {"batch_size": 12},
    "weights": {"weights": HEAVY, "batch_size": 12},
}


def batches(options: TrainingOptions, epoch: int, num: int = NUM) -> list[list[int]]:
    data = samples(num)
    found = epoch_batches(data, sampling.with_data(options, data), epoch)
    return [batch.tolist() for batch in found]


def order(options: TrainingOptions, epoch: int, num: int = NUM) -> list[int]:
    return [index for batch in batches(options, epoch, num) for index in batch]


# ---- exact on any ranks, and resumed ------------------------------------------------------------


@pytest.mark.parametrize("name", ORDERS)
def test_any_number_of_ranks_trains_alike(pools: Pools, name: str) -> None:
    settings = {"epochs": 3, "lr": 0.1, "metrics": ["f1"], **ORDERS[name]}
    held_out = samples(31, DOUBLE, seed=1)
    results = {
        n: train_on(
            pool,
            network(DOUBLE),
            Points(NUM, noise=0.1),
            validation=held_out,
            keep="last",
            **settings,
        )
        for n, pool in ((1, pools[1]), (2, pools[2]), (3, pools[3]))
    }
    one = results[1]
    for n in (2, 3):
        assert results[n].history.loss == pytest.approx(one.history.loss, abs=1e-12)
        assert (weights(results[n].model) - weights(one.model)).abs().max() < 1e-12
    # Validations have each sample once, in its order.
    assert [v.num_samples for v in one.history.validations] == [31] * 3
    with torch.no_grad():
        outputs = one.model(held_out.tensors[0])
    expected = nn.functional.cross_entropy(outputs, held_out.tensors[1]).item()
    assert one.history.validations[-1].loss == pytest.approx(expected, abs=1e-12)
    assert len({tuple(s.loss for s in one.history.steps if s.epoch == e) for e in (1, 2)}) == 2


@pytest.mark.parametrize("name", ORDERS)
def test_it_goes_on_in_the_middle_of_an_epoch_bitwise(
    pools: Pools, tmp_path: Path, name: str
) -> None:
    settings = {"epochs": 3, "lr": 0.1, "checkpoint_every": 1, **ORDERS[name]}

    def train(folder: str, **more: Any) -> Any:
        chosen = {**settings, "checkpoint": str(tmp_path / folder), **more}
        return train_on(pools[2], network(DOUBLE), Points(NUM, noise=0.1), **chosen)

    whole = train("whole")
    stop = len(whole.history.steps) // 2
    train("part", max_steps=stop)
    rest = train("part", resume=True)
    assert [s.loss for s in rest.history.steps] == [s.loss for s in whole.history.steps]
    assert torch.equal(weights(rest.model), weights(whole.model))


def test_a_resume_with_other_weights_is_refused(pools: Pools, tmp_path: Path) -> None:
    settings = {**ORDERS["weights"], "checkpoint": str(tmp_path), "max_steps": 2}
    train_on(pools[1], network(), samples(NUM), **settings)
    with raises(SpmdError, "resume", "weights"):
        train_on(
            pools[1], network(), samples(NUM), resume=True, **{**settings, "weights": [1.0] * NUM}
        )


# ---- weights ------------------------------------------------------------------------------------


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    options = TrainingOptions(weights=[0, 1, 3, 0], seed=5)
    drawn = [index for epoch in range(1, 2001) for index in order(options, epoch, 4)]
    assert len(drawn) == 8000  # as many as the data set has, each epoch
    counts = Counter(drawn)
    assert set(counts) == {1, 2}
    assert counts[2] / counts[1] == pytest.approx(3, rel=0.1)


def test_each_epoch_draws_others_and_once_draws_the_same() -> None:
    options = TrainingOptions(weights=HEAVY)
    assert order(options, 1) != order(options, 2)
    assert order(options, 1) == order(TrainingOptions(weights=np.array(HEAVY)), 1)
    once = TrainingOptions(weights=torch.tensor(HEAVY).double(), shuffle="once")
    assert order(once, 1) == order(once, 2) == order(options, 1)


class Labelled(Points):
    """As torchvision's data sets: the labels are an attribute."""

    def __init__(self, labels: list[int]) -> None:
        super().__init__(len(labels))
        self.targets = torch.tensor(labels)


class Columns:
    """As Hugging Face's data sets: columns by name."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = columns
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return {name: values[key] for name, values in self.columns.items()}


@pytest.mark.parametrize("kind", ["attribute", "tensors", "part", "column"])
def test_balanced_draws_each_class_as_often(kind: str) -> None:
    labels = [0] * 90 + [1] * 9 + [2]
    tensors = TensorDataset(torch.zeros(100, 2), torch.tensor(labels))
    data: Any = {
        "attribute": Labelled(labels),
        "tensors": tensors,
        "part": Subset(Subset(tensors, range(100)), range(100)),
        "column": Columns(text=["a"] * 100, label=labels),
    }[kind]
    options = sampling.with_data(TrainingOptions(weights="balanced"), data)
    drawn = [
        index for epoch in range(1, 201) for b in epoch_batches(data, options, epoch) for index in b
    ]
    counts = Counter(labels[index % 100] for index in drawn)
    assert all(count == pytest.approx(20_000 / 3, rel=0.05) for count in counts.values())


def test_a_sample_that_comes_again_has_random_numbers_of_its_own() -> None:
    data, options = Points(4, noise=1.0), TrainingOptions(weights=[0, 1, 0, 0], batch_size=3)
    shares = list(epoch_shares(data, sampling.with_data(options, data), ALONE, 1))
    inputs = torch.cat([share.inputs for share in shares])
    noise = inputs - data.inputs[1]
    assert len(inputs) == 4
    assert len({tuple(row.tolist()) for row in noise}) == 4
    assert bool(((noise >= 0) & (noise < 1)).all())


# ---- own loops ----------------------------------------------------------------------------------


def test_own_loops_have_the_same_batches() -> None:
    data = samples(NUM)
    for settings in ORDERS.values():
        mine = gpupool.shard_batches(data, epoch=2, **settings)
        options = sampling.with_data(TrainingOptions(**settings), data)
        shares = list(epoch_shares(data, options, ALONE, 2))
        assert len(mine) == len(shares)
        for one, other in zip(mine, shares, strict=True):
            assert torch.equal(one.inputs, other.inputs)


# ---- what makes no sense ------------------------------------------------------------------------


def test_data_sets_with_an_order_of_their_own_are_refused() -> None:
    options = TrainingOptions(weights=HEAVY)
    with raises(OptionsError, "weights"):
        sampling.with_data(options, Stream(5))
    with raises(OptionsError, "weights"):
        sampling.with_data(options, Backwards(5, set()))


@pytest.mark.parametrize("weights", [[1.0], "balanced"])
def test_what_the_data_set_does_not_have_is_refused(pools: Pools, weights: Any) -> None:
    with raises(OptionsError, "weights"):
        train_on(pools[1], network(), Stored(5), weights=weights)


class Stored:
    """A data set that shows nothing of its samples."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no sample is read to find out")
