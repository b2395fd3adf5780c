"""The arithmetic of the order in which patches are taken, and what each rank reads by it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpupool.data.reading.shards import Indices, num_batches, shard
from gpupool.data.segmentation.open_pairs import OpenPairs
from gpupool.data.segmentation.patch_order import patch_order

pairs = st.integers(0, 40)
per_images = st.integers(1, 20)
batch_sizes = st.integers(1, 40)
opens = st.integers(1, 20)


def shares(order: Indices, batch_size: int, rank: int, world_size: int) -> list[Indices]:
    """What a rank takes of each batch."""
    count = num_batches(len(order), batch_size)
    batches = [order[i * batch_size : (i + 1) * batch_size] for i in range(count)]
    return [shard(batch, rank, world_size) for batch in batches]


def most_open(pair_of: Indices) -> int:
    """How many pairs are at most between the first and the last use of them."""
    if len(pair_of) == 0:
        return 0
    _, first = np.unique(pair_of, return_index=True)
    _, last = np.unique(pair_of[::-1], return_index=True)
    changes = np.zeros(len(pair_of) + 1, np.int64)
    np.add.at(changes, first, 1)
    np.add.at(changes, len(pair_of) - last, -1)
    return int(np.cumsum(changes).max())


@given(pairs, per_images, st.integers(0, 5), batch_sizes, opens)
def test_every_patch_is_taken_once(
    num_pairs: int, per_image: int, epoch: int, batch_size: int, open_pairs: int
) -> None:
    order = patch_order(num_pairs, per_image, 7, epoch, batch_size, open_pairs)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(num_pairs * per_image))
    again = patch_order(num_pairs, per_image, 7, epoch, batch_size, open_pairs)
    assert np.array_equal(order, again)


@given(pairs, per_images, batch_sizes, opens)
def test_few_pairs_are_open_at_a_time(
    num_pairs: int, per_image: int, batch_size: int, open_pairs: int
) -> None:
    order = patch_order(num_pairs, per_image, 7, 0, batch_size, open_pairs)
    # a batch that is wider than a pair has patches takes several from each lane
    in_a_batch = open_pairs * (1 + -(-batch_size // (open_pairs * per_image)))
    assert most_open(order // per_image) <= 2 * in_a_batch


@given(st.integers(2, 12), st.integers(1, 4), st.integers(4, 12), st.integers(1, 3))
def test_a_batch_mixes_as_many_pairs_as_are_open(
    open_pairs: int, patches_of_each: int, per_image: int, pairs_of_each: int
) -> None:
    batch_size = open_pairs * patches_of_each
    num_pairs = open_pairs * pairs_of_each
    order = patch_order(num_pairs, per_image, 7, 0, batch_size, open_pairs) // per_image
    for i in range(len(order) // batch_size):
        batch = order[i * batch_size : (i + 1) * batch_size]
        # two lanes share a pair at the beginning, and at the end
        assert len(np.unique(batch)) >= -(-open_pairs // 2)


@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(0, 3),
)
def test_a_rank_reads_each_pair_once_and_most_are_read_by_one_rank(
    world_size: int, lanes_of_each: int, per_image: int, more: int, more_pairs: int, epoch: int
) -> None:
    open_pairs = world_size * lanes_of_each
    batch_size, num_pairs = open_pairs + more, open_pairs + more_pairs
    order = patch_order(num_pairs, per_image, 3, epoch, batch_size, open_pairs)
    reads = []
    for rank in range(world_size):
        read: list[int] = []
        capacity = 2 * open_pairs + 64 // per_image + 1
        opened = OpenPairs(capacity, per_image, read.append, lambda number, raw: number)
        for share in shares(order, batch_size, rank, world_size):
            # the loader fetches further ahead than it decodes, but in this order
            for pair in [opened.fetch(int(patch) // per_image) for patch in share]:
                assert opened.decode(pair) == pair.number
        assert len(read) == len(set(read))
        reads += read
    assert len(reads) - num_pairs <= 2 * open_pairs * world_size
    if lanes_of_each % 2 == 0 and num_pairs % open_pairs == 0 and more == 0:
        # lanes that begin with a shared pair belong to one rank
        assert len(reads) <= num_pairs + world_size * open_pairs // 2


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {
        tuple(patch_order(20, 4, seed, epoch, 8, 4)) for seed in range(3) for epoch in range(3)
    }
    assert len(orders) == 9


def test_lanes_need_their_next_pairs_at_different_times() -> None:
    order = patch_order(64, 32, 0, 0, 16, 16).reshape(-1, 16) // 32
    changes = (order[1:] != order[:-1]).sum(1)
    # 16 pairs each 32 batches: one every other batch, not 16 at once
    assert changes[:-32].max() <= 2
