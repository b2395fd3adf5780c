"""Who gets which sample of which global batch: pure arithmetic. Runs anywhere; no torch.

An epoch is one permutation of all samples, cut into global batches, each cut into one share per
rank. The world size enters only in the last cut, so N ranks see together exactly what one sees.

    order = epoch_order(10, seed=0, epoch=0, shuffle=False)   # 0 1 2 3 4 5 6 7 8 9
    batch = order[4:8]                                        # the second of size 4: 4 5 6 7
    shard(batch, 1, 3)                                        # rank 1 of 3: 5
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import OptionsError

Indices = NDArray[np.int64]


def epoch_order(
    num_samples: int,
    seed: int,
    epoch: int,
    shuffle: bool = True,
    *,
    weights: Sequence[float] | None = None,
) -> Indices:
    """The samples of one epoch in order: shape (num_samples,), every index exactly once.

    It depends on the arguments alone, so any epoch can be made again when training resumes.
    `weights` draw the samples in proportion, with replacement.
    """
    if not shuffle:
        return np.arange(num_samples, dtype=np.int64)
    generator = keyed_generator(seed, epoch)
    if weights is None:
        order = generator.permutation(num_samples)
    else:
        upto = np.cumsum(np.asarray(weights, np.float64))
        # "right": what has the weight 0 ends where it begins, and no number falls between
        order = np.searchsorted(upto / upto[-1], generator.random(num_samples), "right")
    return order.astype(np.int64, copy=False)


def num_batches(num_samples: int, batch_size: int) -> int:
    """How many global batches an epoch has; the last one may be short, none is dropped."""
    if batch_size < 1:
        raise OptionsError(f"batch_size={batch_size} must be at least 1")
    return -(-num_samples // batch_size)


def global_batches(order: Indices, batch_size: int, samples_done: int = 0) -> list[Indices]:
    """What is left of an epoch after its first `samples_done` samples, cut into global batches.

    Any epoch resumes from these two integers, its number and `samples_done`: with other ranks, and
    with another `batch_size` too, each sample still comes once.
    """
    num_batches(len(order), batch_size)  # refuses a batch size of nothing
    if not 0 <= samples_done <= len(order):
        raise OptionsError(f"samples_done={samples_done} must be in 0..{len(order)}")
    return [order[i : i + batch_size] for i in range(samples_done, len(order), batch_size)]


def is_permutation(order: Indices, num_samples: int) -> bool:
    if order.shape != (num_samples,) or order.dtype.kind not in "iu":
        return False
    if num_samples and not 0 <= order.min() <= order.max() < num_samples:
        return False
    return bool((np.bincount(order, minlength=num_samples) == 1).all())


def shard(batch: Indices, rank: int, world_size: int) -> Indices:
    """One rank's contiguous share of a global batch (a view).

    The shares of all ranks together are the batch, in order. Their sizes differ by at most 1, so
    some are empty when the batch has fewer samples than there are ranks.
    """
    if not 0 <= rank < world_size:
        raise OptionsError(f"rank={rank} must be in 0..world_size-1, with world_size={world_size}")
    size = len(batch)
    return batch[size * rank // world_size : size * (rank + 1) // world_size]


def shard_in_parts(
    batch: Indices, rank: int, world_size: int, num_parts: int
) -> tuple[Indices, tuple[int, ...]]:
    """One rank's share of a global batch that is cut into parts first, and the sizes of its parts.

    So each part has the same samples, over all ranks together, whatever their number.
    """
    if num_parts == 1:  # without a copy
        share = shard(batch, rank, world_size)
        return share, (len(share),)
    edges = [len(batch) * part // num_parts for part in range(num_parts + 1)]
    parts = [shard(batch[i:j], rank, world_size) for i, j in pairwise(edges)]
    return np.concatenate(parts), tuple(map(len, parts))


def keyed_generator(seed: int, stream: int) -> np.random.Generator:
    """A random generator that (seed, stream) determine; others are statistically independent."""
    for name, value in (("seed", seed), ("stream", stream)):
        if not 0 <= value < 2**64:
            raise OptionsError(f"{name}={value} must be in 0..2**64-1")
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
