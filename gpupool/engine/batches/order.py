"""Which samples are in which global batch of an epoch. Runs on engines.

(seed, epoch) alone decide, so that a training that resumes finds its place on any ranks. A
`batch_sampler` of the user's decides alone: every rank walks through it, and the ranks compare what
it gave.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import TensorDataset

from gpupool.core.errors import TrainingError
from gpupool.core.options.datasets import is_stream
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data.reading import shards
from gpupool.data.reading.augmentation import keyed_draws
from gpupool.data.reading.samples import Draw
from gpupool.data.reading.shards import Indices
from gpupool.engine.batches.share import Dataset, num_samples
from gpupool.engine.group.forming import World

_MOST_PASSES = 1000  # over the data set, in one epoch: a sampler that gives more has no end
_OF_SAMPLER = 2**63  # keys the random numbers of a sampler: no sample has this index

# id of a sampler -> it, if it is still that one, and the epoch that it was walked through last
_walks: dict[int, tuple[weakref.ref[Any], int, list[Indices]]] = {}


def epoch_batches(
    dataset: Dataset, options: TrainingOptions, epoch: int, samples_done: int = 0
) -> list[Indices]:
    """The global batches of an epoch as sample indices: the same on every rank, for any ranks.

    `samples_done` of the epoch are left out: what remains is the same, whatever the number of ranks
    was before or is now. Where a sample comes for the (k + 1)th time in the epoch, its index is k
    times the length of the data set larger, if `may_repeat`.

    Raises TrainingError if the data set orders its epochs itself, and not each sample comes once;
    or if a `batch_sampler` gives anything but lists of indices.
    """
    if options.batch_sampler is not None:
        batches = _sampled(options, len(dataset), epoch)
        if may_repeat(dataset, options):
            ends = np.cumsum([len(batch) for batch in batches])[:-1]
            batches = np.split(_numbered(np.concatenate(batches), len(dataset)), ends)
        return _after(batches, samples_done)
    shuffled_epoch = 1 if options.shuffle == "once" else epoch
    shuffles = options.shuffle != "never"
    if shuffles and hasattr(dataset, "epoch_order"):
        # Patches of one image stay together, for example; a sample left out would go unnoticed.
        order = dataset.epoch_order(options.seed, shuffled_epoch, options.batch_size)
        if not shards.is_permutation(order, len(dataset)):
            raise TrainingError(
                f"epoch_order() of the {type(dataset).__name__} does not name each of its "
                f"{len(dataset):,} samples once; correct it, or take it away.",
                "epoch order",
            )
    else:
        order = shards.epoch_order(
            len(dataset),
            options.seed,
            shuffled_epoch,
            shuffle=shuffles,
            weights=options.weights,  # type: ignore[arg-type] # numbers by now
            lengths=options.bucket_by,  # type: ignore[arg-type]
            batch_size=options.batch_size,
        )
        if may_repeat(dataset, options):
            order = _numbered(order, len(dataset))
    return shards.global_batches(order, options.batch_size, samples_done)


def epoch_size(dataset: Dataset, options: TrainingOptions, epoch: int) -> int:
    """How many samples an epoch has, those that come again included; 0 of a stream."""
    if is_stream(dataset):  # its len(), if it has one, may be a guess
        return 0
    if options.batch_sampler is not None:
        return sum(map(len, _sampled(options, len(dataset), epoch)))
    return num_samples(dataset)


def may_repeat(dataset: Dataset, options: TrainingOptions) -> bool:
    """Whether a sample may come more than once in an epoch, and differ then."""
    draws = options.weights is not None or options.batch_sampler is not None
    # Rows of tensors draw no random numbers, and are gathered by their plain indices.
    return draws and type(dataset) is not TensorDataset


def compare(batches: Sequence[Indices], options: TrainingOptions, world: World, epoch: int) -> None:
    """Raise TrainingError, on every rank, if a sampler did not give the same on all of them."""
    checksum = 0
    for batch in batches:
        checksum = zlib.crc32(
            batch.tobytes(), zlib.crc32(len(batch).to_bytes(8, "little"), checksum)
        )
    came = world.gather((len(batches), sum(map(len, batches)), checksum))
    if len(set(came)) == 1:
        return
    rank = next(rank for rank, one in enumerate(came) if one != came[0])
    what = "other indices came"
    if came[rank][:2] != came[0][:2]:
        counts = [f"{num:,} batches of {size:,} samples" for num, size, _ in (came[0], came[rank])]
        what = f"{counts[0]} came on rank 0, {counts[1]} on rank {rank}"
    raise TrainingError(
        f"epoch {epoch}: the batch_sampler is not the same on every rank, {what}. Let it shuffle "
        "by the epoch (set_epoch) or by torch's random numbers, and not split itself by rank: "
        "gpupool does that.",
        "ranks differ",
        "batch_sampler",
    )


def _sampled(options: TrainingOptions, num: int, epoch: int) -> list[Indices]:
    """The batches that a sampler gives in an epoch."""
    sampler: Any = options.batch_sampler
    if isinstance(sampler, Sequence):
        return _walk(sampler, options, num, epoch)
    reference, walked, batches = _walks.get(id(sampler), (None, 0, []))
    if reference is None or reference() is not sampler:  # ids are used again
        walked = 0
    if walked == epoch:
        return batches
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    else:
        # One that counts its epochs, or has a generator of its own, is where it was before a
        # checkpoint when it has been walked through as often.
        for earlier in range(walked + 1, epoch):
            _walk(sampler, options, num, earlier)
    batches = _walk(sampler, options, num, epoch)
    key = id(sampler)
    try:
        reference = weakref.ref(sampler, lambda _: _walks.pop(key, None))
    except TypeError:  # cannot be watched
        return batches
    _walks[key] = reference, epoch, batches
    return batches


def _walk(sampler: Iterable[Any], options: TrainingOptions, num: int, epoch: int) -> list[Indices]:
    # One more than training can use: it shows that the epoch does not end there.
    most = None if options.max_steps is None else options.max_steps + 1
    found: list[Indices] = []
    size = 0
    # torch's samplers draw a seed from its random numbers, which must be the same on every rank.
    with keyed_draws(Draw(options.seed, epoch), _OF_SAMPLER):
        for batch in islice(sampler, most):
            found.append(_indices(batch, len(found), num))
            size += len(found[-1])
            if size > _MOST_PASSES * num:
                raise TrainingError(
                    f"batch_sampler has given {size:,} indices for {num:,} samples in one epoch, "
                    "and has not ended: let its __iter__ end, or give max_steps.",
                    "no end",
                    "batch_sampler",
                )
    if not found:
        raise TrainingError(
            f"batch_sampler gave no batch in epoch {epoch}; if it was walked through before, let "
            "its __iter__ start over each time.",
            "no batch",
            "batch_sampler",
        )
    return found


def _indices(batch: Any, number: int, num: int) -> Indices:
    """A batch of a sampler, checked; `number` counts the batches from 0."""
    try:
        indices = np.array([int(index) for index in batch], dtype=np.int64)
    except (TypeError, ValueError):
        raise TrainingError(
            f"batch_sampler gave {batch!r} as batch {number + 1}: it must give lists of indices; "
            "torch.utils.data.BatchSampler(sampler, batch_size, drop_last=False) makes them of a "
            "sampler.",
            "no indices",
            "batch_sampler",
        ) from None
    if not len(indices):
        raise TrainingError(
            f"batch_sampler gave an empty list as batch {number + 1}: leave it out.",
            "empty batch",
            "batch_sampler",
        )
    low, high = indices.min(), indices.max()
    if low < 0 or high >= num:
        raise TrainingError(
            f"batch_sampler gave the index {low if low < 0 else high:,} in batch {number + 1}; the "
            f"data set has the indices 0 to {num - 1:,}.",
            "range",
            "batch_sampler",
        )
    return indices


def _numbered(order: Indices, num: int) -> Indices:
    """The indices; where one comes for the (k + 1)th time, `k * num` larger."""
    by_index = np.argsort(order, kind="stable")
    ordered = order[by_index]
    firsts = np.searchsorted(ordered, ordered)  # where those with the same index begin
    numbered = np.empty_like(order)
    numbered[by_index] = ordered + num * (np.arange(len(order)) - firsts)
    return numbered


def _after(batches: Sequence[Indices], samples_done: int) -> list[Indices]:
    """What is left of the batches after so many samples."""
    left = []
    for batch in batches:
        if samples_done < len(batch):
            left.append(batch[samples_done:])
        samples_done = max(0, samples_done - len(batch))
    return left
