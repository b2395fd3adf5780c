"""The arithmetic of who gets which sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.core.errors import OptionsError
from gpupool.data.reading.shards import (
    Indices,
    epoch_order,
    global_batches,
    is_permutation,
    num_batches,
    shard,
    shard_in_parts,
)
from tests.support.raising import raises

sizes = st.integers(0, 500)
keys = st.integers(0, 2**64 - 1)
worlds = st.integers(1, 20)


def batches_of(order: Indices, batch_size: int) -> list[Indices]:
    count = num_batches(len(order), batch_size)
    return [order[i * batch_size : (i + 1) * batch_size] for i in range(count)]


@given(sizes, keys, st.integers(0, 1000), st.integers(1, 70), worlds)
def test_every_sample_is_in_exactly_one_share(
    num_samples: int, seed: int, epoch: int, batch_size: int, world_size: int
) -> None:
    order = epoch_order(num_samples, seed, epoch, shuffle=True)
    shares = [
        shard(batch, rank, world_size)
        for batch in batches_of(order, batch_size)
        for rank in range(world_size)
    ]
    seen = np.concatenate([np.empty(0, np.int64), *shares])
    assert sorted(seen) == list(range(num_samples))


@given(sizes, worlds, st.integers(1, 9))
def test_a_part_has_the_same_samples_for_any_number_of_ranks(
    num_samples: int, world_size: int, num_parts: int
) -> None:
    batch = np.arange(num_samples)
    of_ranks = []
    for rank in range(world_size):
        share, part_sizes = shard_in_parts(batch, rank, world_size, num_parts)
        of_ranks.append(np.split(share, np.cumsum(part_sizes)[:-1]))
    parts = [np.concatenate(part) for part in zip(*of_ranks, strict=True)]
    alone, its_sizes = shard_in_parts(batch, 0, 1, num_parts)
    assert list(map(len, parts)) == list(its_sizes)
    assert np.array_equal(np.concatenate(parts), alone)


@given(sizes, keys, st.integers(1, 70), worlds)
def test_all_ranks_together_see_the_batch_that_one_rank_sees(
    num_samples: int, seed: int, batch_size: int, world_size: int
) -> None:
    for batch in batches_of(epoch_order(num_samples, seed, 3, shuffle=True), batch_size):
        shares = [shard(batch, rank, world_size) for rank in range(world_size)]
        assert np.array_equal(np.concatenate(shares), batch)
        lengths = [len(share) for share in shares]
        assert max(lengths) - min(lengths) <= 1


@given(sizes, keys, st.integers(0, 1000))
def test_the_order_depends_on_seed_and_epoch_alone(num_samples: int, seed: int, epoch: int) -> None:
    first = epoch_order(num_samples, seed, epoch, shuffle=True)
    np.random.default_rng(0).random(7)
    assert first.dtype == np.int64
    assert np.array_equal(first, epoch_order(num_samples, seed, epoch, shuffle=True))


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = [epoch_order(50, seed, epoch, shuffle=True) for seed in range(5) for epoch in range(5)]
    assert len({tuple(order) for order in orders}) == 25


def test_without_shuffle_the_order_is_that_of_the_data() -> None:
    assert list(epoch_order(4, seed=1, epoch=2, shuffle=False)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "expected"), [(0, 4, 0), (4, 4, 1), (5, 4, 2), (3, 4, 1)]
)
def test_the_last_batch_may_be_short(num_samples: int, batch_size: int, expected: int) -> None:
    assert num_batches(num_samples, batch_size) == expected


def test_a_share_may_be_empty() -> None:
    assert [len(shard(np.arange(2), rank, 3)) for rank in range(3)] == [0, 1, 1]


def test_impossible_arguments_are_refused() -> None:
    with raises(OptionsError, "batch_size"):
        num_batches(10, 0)
    with raises(OptionsError, "rank"):
        shard(np.arange(4), 2, 2)
    with raises(OptionsError, "seed", "seed=-1"):
        epoch_order(4, -1, 0, shuffle=True)


@given(sizes, keys, st.integers(1, 70), st.data())
def test_an_epoch_goes_on_from_any_step_with_any_ranks(
    num_samples: int, seed: int, batch_size: int, data: st.DataObject
) -> None:
    order = epoch_order(num_samples, seed, 2)
    whole = global_batches(order, batch_size)
    first_step = data.draw(st.integers(0, len(whole)))
    before, after = data.draw(worlds), data.draw(worlds)
    done = [shard(batch, rank, before) for batch in whole[:first_step] for rank in range(before)]
    samples_done = sum(map(len, done))
    rest = global_batches(order, batch_size, samples_done)
    assert len(rest) == len(whole) - first_step
    assert all(np.array_equal(a, b) for a, b in zip(rest, whole[first_step:], strict=True))
    todo = [shard(batch, rank, after) for batch in rest for rank in range(after)]
    seen = np.concatenate([np.empty(0, np.int64), *done, *todo])
    assert sorted(seen) == list(range(num_samples))


@given(st.integers(0, 200), keys, st.integers(1, 70), st.integers(1, 70), st.data())
def test_an_epoch_goes_on_with_another_batch_size(
    num_samples: int, seed: int, before: int, after: int, data: st.DataObject
) -> None:
    order = epoch_order(num_samples, seed, 0)
    done = global_batches(order, before)
    done = done[: data.draw(st.integers(0, len(done)))]
    rest = global_batches(order, after, sum(map(len, done)))
    seen = np.concatenate([np.empty(0, np.int64), *done, *rest])
    assert np.array_equal(seen, order)


@given(st.lists(st.integers(-2, 12), max_size=12))
def test_a_permutation_has_every_index_once(values: list[int]) -> None:
    order = np.array(values, dtype=np.int64)
    assert is_permutation(order, len(values)) == (sorted(values) == list(range(len(values))))


def test_what_is_no_list_of_indices_is_no_permutation() -> None:
    assert not is_permutation(np.arange(3), 4)
    assert not is_permutation(np.arange(4.0), 4)
    assert not is_permutation(np.arange(4).reshape(2, 2), 4)


def test_a_step_beyond_the_epoch_is_refused() -> None:
    with raises(OptionsError, "samples_done", "=11 ", "0..10"):
        global_batches(np.arange(10), 4, 11)
