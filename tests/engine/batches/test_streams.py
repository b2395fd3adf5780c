"""Data sets of other kinds: streams, rows in dicts, parts of parts, loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import gpupool
from gpupool import DataError, SpmdError, TrainingError, TrainingOptions
from gpupool.core.options.datasets import require_dataset
from gpupool.engine.batches.share import num_samples
from gpupool.engine.batches.shares import epoch_shares
from gpupool.engine.group.forming import World
from gpupool.engine.training.start_event import start_event
from tests.engine.batches.streams import (
    Damaged,
    LongerOnRank1,
    Rows,
    Sized,
    SplitByRank,
    Stream,
    points,
)
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on, weights

DOUBLE = torch.float64
SETTINGS = {"batch_size": 6, "epochs": 2, "lr": 0.1}


def listed(num: int) -> TensorDataset:
    inputs, targets = zip(*points(num), strict=True)
    return TensorDataset(torch.stack(inputs), torch.stack(targets))


@pytest.mark.parametrize("num", [20, 18, 2])
def test_a_stream_trains_as_the_same_samples_in_a_list(pools: Pools, num: int) -> None:
    expected = train_on(pools[1], network(DOUBLE), listed(num), shuffle="never", **SETTINGS)
    for pool in pools.values():
        validation = Stream(7)
        found = train_on(pool, network(DOUBLE), Stream(num), validation=validation, **SETTINGS)
        assert found.history.loss == pytest.approx(expected.history.loss, abs=1e-12)
        assert [s.epoch for s in found.history.steps] == [s.epoch for s in expected.history.steps]
        assert [s.num_samples for s in found.history.steps] == [
            s.num_samples for s in expected.history.steps
        ]
        assert [v.num_samples for v in found.history.validations] == [7, 7]
        assert found.stopped_by == "epochs"
    assert (weights(found.model) - weights(expected.model)).abs().max() < 1e-12


def test_a_stream_that_shuffles_by_the_epoch_is_exact(pools: Pools) -> None:
    settings = {**SETTINGS, "lr": 1e-12}
    stream = Stream(20, shuffles=True, noise=0.1)
    curves = [train_on(p, network(DOUBLE), stream, **settings).history.loss for p in pools.values()]
    assert curves[1] == pytest.approx(curves[0], abs=1e-12)
    first, second = curves[0][:4], curves[0][4:]
    assert first != pytest.approx(second, abs=1e-3)


def test_how_long_it_is_is_known_where_the_stream_tells() -> None:
    assert (num_samples(Sized(9)), num_samples(Stream(9)), num_samples(listed(9))) == (9, 0, 9)
    alone = World(0, 1, torch.device("cpu"))
    for max_steps, known in [(None, 0), (7, 7)]:
        options = TrainingOptions(max_steps=max_steps)
        assert start_event(alone, options, Stream(9), 0, None).num_steps == known


def test_it_goes_on_in_the_middle_of_an_epoch() -> None:
    alone, options = World(0, 1, torch.device("cpu")), TrainingOptions(batch_size=6)
    whole = list(epoch_shares(Stream(20, noise=1.0), options, alone, 3))
    rest = list(epoch_shares(Stream(20, noise=1.0), options, alone, 3, samples_done=12))
    assert [share.num_all for share in whole] == [6, 6, 6, 2]
    assert [share.is_last for share in whole] == [False, False, False, True]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(whole[2:], rest, strict=True))


@pytest.mark.parametrize(
    ("stream", "shown"),
    [
        (SplitByRank(20), " other samples "),
        (LongerOnRank1(20), (" number of samples ", " on rank 1")),
        (LongerOnRank1(19), " longer on rank 1"),
    ],
)
def test_a_stream_that_differs_from_rank_to_rank_is_an_error(
    pools: Pools, stream: Stream, shown: str | tuple[str, ...]
) -> None:
    with raises(SpmdError, shown):
        train_on(pools[2], network(DOUBLE), stream, **SETTINGS)
    assert train_on(pools[2], network(), samples(8), epochs=1).stopped_by == "epochs"


def test_a_stream_that_gives_nothing_is_an_error(pools: Pools) -> None:
    class Once(Stream):
        def __iter__(self) -> Any:
            self.left = getattr(self, "left", None) or super().__iter__()
            return self.left

    with raises(SpmdError, " Once "):
        train_on(pools[2], network(DOUBLE), Once(10), batch_size=4, epochs=3)
    with raises(SpmdError, " Stream "):
        train_on(pools[1], network(DOUBLE), Stream(0), batch_size=4, epochs=3)


def test_a_sample_that_cannot_be_read_may_be_skipped(pools: Pools) -> None:
    good = Subset(listed(20), [i for i in range(20) if i != 5])
    expected = train_on(pools[1], network(DOUBLE), good, shuffle="never", **SETTINGS)
    for n in (1, 2):
        with pytest.raises(SpmdError, match="row 5 is damaged"):
            train_on(pools[n], network(DOUBLE), Damaged(20), **SETTINGS)
        found = train_on(pools[n], network(DOUBLE), Damaged(20), on_error="skip", **SETTINGS)
        assert found.skipped == {"rows/5": "damaged"}
        assert [s.num_samples for s in found.history.steps] == [5, 6, 6, 2] * 2
        assert found.history.loss[0] != pytest.approx(expected.history.loss[0], abs=1e-3)


def test_none_in_a_stream_is_named_and_not_counted() -> None:
    class Holes(Stream):
        def __iter__(self) -> Any:
            yield from (None if n == 5 else one for n, one in enumerate(super().__iter__()))

    alone, options = World(0, 1, torch.device("cpu")), TrainingOptions(batch_size=6)
    with raises(DataError, "sample 5 ", 'on_error="skip"', kind="no sample"):
        list(epoch_shares(Holes(20), options, alone, 1))


def test_outputs_for_a_stream_come_in_its_order(pools: Pools) -> None:
    model = network(DOUBLE)
    with torch.no_grad():
        expected = model(listed(20).tensors[0])
    for pool in pools.values():
        found = gpupool.predict(model, Stream(20), batch_size=7, pool=pool)
        assert torch.allclose(found, expected, atol=1e-12)
    values = gpupool.evaluate(model, Stream(20), batch_size=7, pool=pools[3])
    right = (expected.argmax(1) == listed(20).tensors[1]).sum().item()
    assert values["accuracy"] == right / 20


def test_rows_with_named_columns_are_pairs(pools: Pools) -> None:
    expected = train_on(pools[1], network(DOUBLE), listed(20), **SETTINGS)
    found = train_on(pools[2], network(DOUBLE), Rows(20), **SETTINGS)
    assert found.history.loss == pytest.approx(expected.history.loss, abs=1e-12)


def test_parts_of_parts_are_data_sets(pools: Pools) -> None:
    whole = listed(20)
    parts = ConcatDataset(
        [Subset(whole, range(8)), Subset(Subset(whole, range(5, 20)), range(3, 15))]
    )
    expected = train_on(pools[1], network(DOUBLE), whole, **SETTINGS)
    found = train_on(pools[3], network(DOUBLE), parts, **SETTINGS)
    assert found.history.loss == pytest.approx(expected.history.loss, abs=1e-12)


@pytest.mark.parametrize(
    "dataset",
    [
        DataLoader(samples(8)),
        iter([1]),
        (x for x in [1]),
        5,
        [],
    ],
)
def test_what_is_no_data_set_is_refused_with_what_to_give(dataset: Any) -> None:
    with raises(TrainingError, "dataset"):
        require_dataset("dataset", dataset)


def test_a_network_is_called_with_what_the_data_set_gives(pools: Pools) -> None:
    """A dict stays a dict; of a tuple, torch's collate makes a list."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3, dtype=DOUBLE)

        def forward(self, inputs: Any) -> Any:
            found = inputs["a"] if isinstance(inputs, dict) else inputs[0]
            assert isinstance(inputs, (dict, list))
            return self.layer(found)

    for kind in (dict, tuple):
        rows = [({"a": x} if kind is dict else (x, x), y) for x, y in points(11)]
        curves = []
        for pool in pools.values():
            torch.manual_seed(0)
            curves.append(train_on(pool, Sum(), rows, **SETTINGS).history.loss)
        assert curves[1] == pytest.approx(curves[0], abs=1e-12)
