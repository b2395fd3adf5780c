"""Which samples are in which global batch of an epoch. Runs on engines.

(seed, epoch) alone decide, so that a training that resumes finds its place on any ranks.
"""

from __future__ import annotations

import numpy as np
from torch.utils.data import TensorDataset

from gpupool.core.errors import TrainingError
from gpupool.core.options.datasets import is_stream
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data.reading import shards
from gpupool.data.reading.shards import Indices
from gpupool.engine.batches.share import Dataset, num_samples


def epoch_batches(
    dataset: Dataset, options: TrainingOptions, epoch: int, samples_done: int = 0
) -> list[Indices]:
    """The global batches of an epoch as sample indices: the same on every rank, for any ranks.

    `samples_done` of the epoch are left out: what remains is the same, whatever the number of ranks
    was before or is now. Where a sample comes for the (k + 1)th time in the epoch, its index is k
    times the length of the data set larger.

    Raises TrainingError if the data set orders its epochs itself, and not each sample comes once.
    """
    num, shuffled_epoch = len(dataset), 1 if options.shuffle == "once" else epoch
    shuffles, weights = options.shuffle != "never", options.weights
    if shuffles and hasattr(dataset, "epoch_order"):
        # Patches of one image stay together, for example; a sample left out would go unnoticed.
        order = dataset.epoch_order(options.seed, shuffled_epoch, options.batch_size)
        if not shards.is_permutation(order, num):
            raise TrainingError(
                f"epoch_order() of the {type(dataset).__name__} does not name each of its {num:,} "
                "samples once; correct it, or take it away."
            )
    else:
        order = shards.epoch_order(
            num,
            options.seed,
            shuffled_epoch,
            shuffle=shuffles,
            weights=weights,  # type: ignore[arg-type] # numbers by now
        )
        # Rows of tensors draw no random numbers, and are gathered by their plain indices.
        if weights is not None and type(dataset) is not TensorDataset:
            order = _numbered(order, num)
    return shards.global_batches(order, options.batch_size, samples_done)


def epoch_size(dataset: Dataset) -> int:
    """How many samples an epoch has, those that come again included; 0 of a stream."""
    # The len() of a stream, if it has one, may be a guess.
    return 0 if is_stream(dataset) else num_samples(dataset)


def _numbered(order: Indices, num: int) -> Indices:
    """The indices; where one comes for the (k + 1)th time, `k * num` larger."""
    by_index = np.argsort(order, kind="stable")
    ordered = order[by_index]
    firsts = np.searchsorted(ordered, ordered)  # where those with the same index begin
    numbered = np.empty_like(order)
    numbered[by_index] = ordered + num * (np.arange(len(order)) - firsts)
    return numbered
