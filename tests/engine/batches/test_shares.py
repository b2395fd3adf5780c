"""Which samples are in which batch, and what each rank has of it; of streams too."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import gpupool
from gpupool import (
    DataError,
    OptionsError,
    SampleError,
    SpmdError,
    TrainingError,
    TrainingOptions,
)
from gpupool.core.options import datasets as sampling
from gpupool.engine.batches.shares import Share, epoch_batches, epoch_shares, num_samples
from gpupool.engine.group.forming import World
from tests.engine.training.vectors import DOUBLE, Backwards, Points, Stream, Unlike, Vectors
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on, weights

NUM = 50
HEAVY = [0.0 if i < 10 else 1.0 + i % 3 for i in range(NUM)]
SETTINGS: dict[str, Any] = {"batch_size": 6, "epochs": 2, "lr": 0.1}


def shares_of(
    data: Any, n: int = 1, epoch: int = 1, samples_done: int = 0, **settings: Any
) -> list[list[Share]]:
    options = sampling.with_data(TrainingOptions(**settings), data)
    worlds = (World(rank, n, torch.device("cpu")) for rank in range(n))
    return [list(epoch_shares(data, options, one, epoch, samples_done)) for one in worlds]


def order(options: TrainingOptions, epoch: int, data: Any = None) -> list[int]:
    data = data or samples(NUM)
    batches = epoch_batches(data, sampling.with_data(options, data), epoch)
    return np.concatenate(batches).tolist()


def together(shares: tuple[Share, ...], half: str) -> Tensor:
    return torch.cat([getattr(share, half)[: share.num_here] for share in shares])


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 12},
        {"batch_size": 12, "weights": HEAVY},
        {"batch_size": 2, "shuffle": "never"},
        {"batch_size": 12, "collate": torch.utils.data.default_collate, "samples_done": 24},
        {"batch_size": 12, "epoch": 7, "on_error": "skip"},
    ],
)
def test_shares_of_all_ranks_are_the_batches_of_one(n: int, settings: dict[str, Any]) -> None:
    """With the same noise; a rank without samples holds one that counts nothing."""
    for data in (Points(NUM, noise=0.1), Vectors(NUM, set(), noise=0.1)):
        (alone,) = shares_of(data, **settings)
        for whole, *parts in zip(alone, *shares_of(data, n, **settings), strict=True):
            for half in ("inputs", "targets"):
                assert torch.equal(together(tuple(parts), half), getattr(whole, half))
            assert sum(part.num_here for part in parts) == whole.num_here
            assert {(part.num_all, part.is_last) for part in parts} == {
                (whole.num_all, whole.is_last)
            }
            assert {len(part.inputs) for part in parts if not part.num_here} <= {1}
        assert [share.is_last for share in alone] == [False] * (len(alone) - 1) + [True]


# ---- orders -------------------------------------------------------------------------------------


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    options = TrainingOptions(weights=[0, 1, 3, 0], seed=5)
    drawn = [index for epoch in range(1, 2001) for index in order(options, epoch, samples(4))]
    counts = Counter(drawn)
    assert (len(drawn), set(counts)) == (8000, {1, 2})  # as many as the data set has, each epoch
    assert counts[2] / counts[1] == pytest.approx(3, rel=0.1)
    options = TrainingOptions(weights=HEAVY)
    assert order(options, 1) != order(options, 2)
    assert order(options, 1) == order(TrainingOptions(weights=np.array(HEAVY)), 1)
    once = TrainingOptions(weights=torch.tensor(HEAVY).double(), shuffle="once")
    assert order(once, 1) == order(once, 2) == order(options, 1)


def test_balanced_gives_each_class_the_same_weight() -> None:
    labels = [0] * 90 + [1] * 9 + [2]
    tensors, labelled = TensorDataset(torch.zeros(100, 2), torch.tensor(labels)), Points(100)
    labelled.targets = torch.tensor(labels)  # type: ignore[attr-defined]
    part = Subset(Subset(tensors, range(100)), range(100))
    for data in (tensors, labelled, part):
        found = sampling.with_data(TrainingOptions(weights="balanced"), data).weights
        assert found == pytest.approx([1 / 90] * 90 + [1 / 9] * 9 + [1.0])


def test_a_sample_that_comes_again_has_random_numbers_of_its_own() -> None:
    data = Points(4, noise=1.0)
    (shares,) = shares_of(data, weights=[0, 1, 0, 0], batch_size=3)
    noise = torch.cat([share.inputs for share in shares]) - data.rows[1][0]
    assert len({tuple(row.tolist()) for row in noise}) == len(noise) == 4


def test_weights_that_nothing_can_use_are_refused() -> None:
    unknown = type("Stored", (), {"__len__": lambda self: 5, "__getitem__": None})()
    for data, given in [
        (Stream(5), [1.0] * 5),
        (Backwards(5, set()), [1.0] * 5),
        (unknown, [1.0]),
        (unknown, "balanced"),
        (TensorDataset(torch.zeros(5, 2), torch.zeros(5)), "balanced"),  # no two classes
    ]:
        with raises(OptionsError, "weights"):
            sampling.with_data(TrainingOptions(weights=given), data)


def test_a_resume_with_other_weights_is_refused(pools: Pools, tmp_path: Path) -> None:
    settings = {"batch_size": 12, "checkpoint": str(tmp_path), "max_steps": 2}
    train_on(pools[1], network(), samples(NUM), weights=HEAVY, **settings)
    with raises(SpmdError, "resume", "weights"):
        train_on(pools[1], network(), samples(NUM), resume=True, weights=[1.0] * NUM, **settings)


# ---- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [20, 2])
def test_a_stream_trains_as_the_same_samples_in_a_list(pools: Pools, num: int) -> None:
    data, settings = samples(num, DOUBLE), {**SETTINGS, "shuffle": "never"}
    expected = train_on(pools[1], network(DOUBLE), data, **settings)
    for n in (2, 3):
        found = train_on(pools[n], network(DOUBLE), Stream(num), validation=Stream(7), **SETTINGS)
        assert found.history.loss == pytest.approx(expected.history.loss, abs=1e-12)
        for name in ("epoch", "num_samples"):
            assert [getattr(s, name) for s in found.history.steps] == [
                getattr(s, name) for s in expected.history.steps
            ]
        assert [v.num_samples for v in found.history.validations] == [7, 7]
        assert found.stopped_by == "epochs"
    assert (weights(found.model) - weights(expected.model)).abs().max() < 1e-12


def test_a_stream_that_shuffles_by_the_epoch_is_exact(pools: Pools) -> None:
    settings = {**SETTINGS, "lr": 1e-12}
    stream = Stream(20, shuffles=True, noise=0.1)
    curves = [train_on(pools[n], network(DOUBLE), stream, **settings) for n in (1, 3)]
    losses = [one.history.loss for one in curves]
    assert losses[1] == pytest.approx(losses[0], abs=1e-12)
    assert losses[0][:4] != pytest.approx(losses[0][4:], abs=1e-3)


class Sized(Stream):
    def __len__(self) -> int:
        return self.num


def test_how_long_it_is_is_known_where_the_stream_tells() -> None:
    assert [num_samples(data) for data in (Sized(9), Stream(9), samples(9))] == [9, 0, 9]


def test_it_goes_on_in_the_middle_of_an_epoch() -> None:
    (whole,) = shares_of(Stream(20, noise=1.0), epoch=3, batch_size=6)
    (rest,) = shares_of(Stream(20, noise=1.0), epoch=3, samples_done=12, batch_size=6)
    assert [share.num_all for share in whole] == [6, 6, 6, 2]
    assert [share.is_last for share in whole] == [False, False, False, True]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(whole[2:], rest, strict=True))


@pytest.mark.parametrize("stream", [Unlike(20, True), Unlike(20, False), Unlike(19, False)])
def test_a_stream_that_differs_from_rank_to_rank_is_an_error(pools: Pools, stream: Stream) -> None:
    with raises(SpmdError, "epoch 1", "set_epoch", ename="TrainingError"):
        train_on(pools[2], network(DOUBLE), stream, **SETTINGS)
    assert train_on(pools[2], network(DOUBLE), samples(8, DOUBLE), epochs=1).stopped_by == "epochs"


def test_a_stream_that_gives_nothing_is_an_error(pools: Pools) -> None:
    class Once(Stream):
        def __iter__(self) -> Any:
            self.left = getattr(self, "left", None) or super().__iter__()
            return self.left

    with raises(SpmdError, " Once "):
        train_on(pools[2], network(DOUBLE), Once(10), batch_size=4, epochs=3)


@pytest.mark.parametrize(("damaged", "named"), [(4, "row 4"), (9, "sample 5 ")])
def test_what_is_no_sample_of_a_stream_is_named(damaged: int, named: str) -> None:

    class Holes(Stream):
        def __iter__(self) -> Any:
            for number, one in enumerate(super().__iter__()):
                if number == damaged:
                    raise SampleError(f"row {number} is damaged")
                yield None if number == 5 else one

    with pytest.raises(DataError, match=named):
        shares_of(Holes(20), batch_size=6)


def test_outputs_for_a_stream_come_in_its_order(pools: Pools) -> None:
    model, (inputs, targets) = network(DOUBLE), samples(20, DOUBLE).tensors
    with torch.no_grad():
        expected = model(inputs)
    found = gpupool.predict(model, Stream(20), batch_size=7, pool=pools[3])
    assert torch.allclose(found, expected, atol=1e-12)
    values = gpupool.evaluate(model, Stream(20), batch_size=7, pool=pools[3])
    assert values["accuracy"] == (expected.argmax(1) == targets).sum().item() / 20


# ---- other kinds --------------------------------------------------------------------------------


def test_rows_with_named_columns_and_parts_of_parts_are_data_sets(pools: Pools) -> None:
    whole = samples(20, DOUBLE)
    parts = [Subset(whole, range(8)), Subset(Subset(whole, range(5, 20)), range(3, 15))]
    rows = [{"label": label, "image": inputs} for inputs, label in whole]
    expected = train_on(pools[1], network(DOUBLE), whole, **SETTINGS).history.loss
    for dataset in (rows, ConcatDataset(parts)):
        found = train_on(pools[2], network(DOUBLE), dataset, **SETTINGS)
        assert found.history.loss == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dataset", [DataLoader(samples(8)), iter([1]), (x for x in [1]), 5, []])
def test_what_is_no_data_set_is_refused_with_what_to_give(dataset: Any) -> None:
    with raises(TrainingError, "dataset"):
        sampling.require_dataset("dataset", dataset)
