"""Streams, and data sets of other kinds: rows in dicts, parts of parts, loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

import gpupool
from gpupool import DataError, SpmdError, TrainingError, TrainingOptions
from gpupool.core.options.datasets import require_dataset
from gpupool.engine.batches.share import num_samples
from gpupool.engine.batches.shares import epoch_shares
from gpupool.engine.group.forming import World
from gpupool.engine.training.start_event import start_event
from tests.engine.batches.streams import Damaged, Sized, Stream, Unlike, listed, points
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on, weights

DOUBLE = torch.float64
SETTINGS: dict[str, Any] = {"batch_size": 6, "epochs": 2, "lr": 0.1}
ALONE = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("num", [20, 2])
def test_a_stream_trains_as_the_same_samples_in_a_list(pools: Pools, num: int) -> None:
    expected = train_on(pools[1], network(DOUBLE), listed(num), shuffle="never", **SETTINGS)
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


def test_how_long_it_is_is_known_where_the_stream_tells() -> None:
    assert (num_samples(Sized(9)), num_samples(Stream(9)), num_samples(listed(9))) == (9, 0, 9)
    for max_steps in (None, 7):
        options = TrainingOptions(max_steps=max_steps)
        assert start_event(ALONE, options, Stream(9), 0, None).num_steps == (max_steps or 0)


def test_it_goes_on_in_the_middle_of_an_epoch() -> None:
    options = TrainingOptions(batch_size=6)
    whole = list(epoch_shares(Stream(20, noise=1.0), options, ALONE, 3))
    rest = list(epoch_shares(Stream(20, noise=1.0), options, ALONE, 3, samples_done=12))
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


def test_a_sample_that_cannot_be_read_may_be_skipped(pools: Pools) -> None:
    curves = []
    for n in (1, 3):
        with pytest.raises(SpmdError, match="row 5 is damaged"):
            train_on(pools[n], network(DOUBLE), Damaged(20), **SETTINGS)
        found = train_on(pools[n], network(DOUBLE), Damaged(20), on_error="skip", **SETTINGS)
        assert found.skipped == {"rows/5": "damaged"}
        assert [s.num_samples for s in found.history.steps] == [5, 6, 6, 2] * 2
        curves.append(found.history.loss)
    assert curves[1] == pytest.approx(curves[0], abs=1e-12)


def test_none_in_a_stream_is_named_and_not_counted() -> None:
    class Holes(Stream):
        def __iter__(self) -> Any:
            yield from (None if n == 5 else one for n, one in enumerate(super().__iter__()))

    with raises(DataError, "sample 5 ", 'on_error="skip"', kind="no sample"):
        list(epoch_shares(Holes(20), TrainingOptions(batch_size=6), ALONE, 1))


def test_outputs_for_a_stream_come_in_its_order(pools: Pools) -> None:
    model = network(DOUBLE)
    with torch.no_grad():
        expected = model(listed(20).tensors[0])
    found = gpupool.predict(model, Stream(20), batch_size=7, pool=pools[3])
    assert torch.allclose(found, expected, atol=1e-12)
    values = gpupool.evaluate(model, Stream(20), batch_size=7, pool=pools[3])
    right = (expected.argmax(1) == listed(20).tensors[1]).sum().item()
    assert values["accuracy"] == right / 20


def test_rows_with_named_columns_and_parts_of_parts_are_data_sets(pools: Pools) -> None:
    whole = listed(20)
    parts = [Subset(whole, range(8)), Subset(Subset(whole, range(5, 20)), range(3, 15))]
    rows = [{"label": label, "image": inputs} for inputs, label in points(20)]
    expected = train_on(pools[1], network(DOUBLE), whole, **SETTINGS).history.loss
    for dataset in (rows, ConcatDataset(parts)):
        found = train_on(pools[2], network(DOUBLE), dataset, **SETTINGS)
        assert found.history.loss == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dataset", [DataLoader(samples(8)), iter([1]), (x for x in [1]), 5, []])
def test_what_is_no_data_set_is_refused_with_what_to_give(dataset: Any) -> None:
    with raises(TrainingError, "dataset"):
        require_dataset("dataset", dataset)
