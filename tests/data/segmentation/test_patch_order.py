"""The order in which patches are taken."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpupool.data.segmentation.patch_order import patch_order

pairs = st.integers(0, 40)
per_images = st.integers(1, 20)
batch_sizes = st.integers(1, 40)
opens = st.integers(1, 20)


@given(pairs, per_images, st.integers(0, 5), batch_sizes, opens)
def test_every_patch_is_taken_once(
    num_pairs: int, per_image: int, epoch: int, batch_size: int, open_pairs: int
) -> None:
    order = patch_order(num_pairs, per_image, 7, epoch, batch_size, open_pairs)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(num_pairs * per_image))
    again = patch_order(num_pairs, per_image, 7, epoch, batch_size, open_pairs)
    assert np.array_equal(order, again)


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {
        tuple(patch_order(20, 4, seed, epoch, 8, 4)) for seed in range(3) for epoch in range(3)
    }
    assert len(orders) == 9
