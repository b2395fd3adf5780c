"""Why a loss is NaN or infinite: a sample that holds such a number, or divergence. On engines.

Nothing is looked at before: the batch of that step is read again, when the report has come. Its
samples and their random numbers follow from (seed, epoch), so it is the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from gpupool.core.options.datasets import is_stream
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data.reading import shards, subsets
from gpupool.data.reading.trees import tensors
from gpupool.engine.batches.order import epoch_batches
from gpupool.engine.batches.share import Dataset, Share, parts_of_batch
from gpupool.engine.group.forming import World


@dataclass(frozen=True, order=True, slots=True)
class BadSample:
    """What a rank has found in its share; of several the first, and how many there are.

    `index` is -1 where it is not known which sample it is, `name` "" where it has none.
    """

    is_infinite: bool
    half: str
    index: int
    name: str
    count: int

    def __str__(self) -> str:
        sample = f"sample {self.index}" if self.index >= 0 else "a sample of this step"
        named = f" ({self.name})" if self.name else ""
        more = f", and {self.count - 1} more of this step are so" if self.count > 1 else ""
        what = "infinite numbers" if self.is_infinite else "NaN"
        return (
            f"the {self.half} of {sample}{named} hold {what}{more}. Repair it, or leave it out of "
            "the data set"
        )


def find(
    shares: Callable[[], Iterator[Share]],
    dataset: Dataset,
    options: TrainingOptions,
    world: World,
    epoch: int,
    samples_done: int,
) -> BadSample | None:
    """The first sample of a step whose inputs or targets are not finite; the same on all ranks.

    Args:
        shares: reads the epoch again, from this step on.
        samples_done: how many of its samples come before this step.
    """
    here = None
    try:
        with closing(shares()) as again:  # type: ignore[type-var] # each is a generator
            share = next(again, None)  # a stream may bear one walk only
            here = None if share is None else _in_share(share)
            if here is not None and share is not None:
                index = _index(here.index, share, dataset, options, world, epoch, samples_done)
                here = replace(here, index=index, name=_name(dataset, index))
            del share
    except Exception as error:
        # Ranks that read a stream compare each batch of it: only this error comes on all alike.
        if is_stream(dataset) and getattr(error, "kind", "") != "no sample":
            raise
    every: list[BadSample] = [one for one in world.gather(here) if one is not None]
    if not every:
        return None
    return replace(min(every), count=sum(one.count for one in every))


def _in_share(share: Share) -> BadSample | None:
    """What is in this rank's share; the index is the sample's place in it."""
    found: list[BadSample] = [
        sample
        for half, tree in (("inputs", share.inputs), ("targets", share.targets))
        for tensor in tensors(tree)
        if share.num_here and (sample := _in_tensor(tensor, half, share.num_here)) is not None
    ]
    return min(found) if found else None


def _in_tensor(tensor: Tensor, half: str, num_here: int) -> BadSample | None:
    if not tensor.is_floating_point():
        return None
    for is_infinite, bad in ((False, tensor.isnan()), (True, tensor.isinf())):
        if not bad.any():
            continue
        if not tensor.ndim or len(tensor) != num_here:
            return BadSample(is_infinite, half, -1, "", 1)
        rows = bad.view(num_here, -1).any(1).nonzero().flatten().tolist()
        return BadSample(is_infinite, half, rows[0], "", len(rows))
    return None


def _index(
    row: int,
    share: Share,
    dataset: Dataset,
    options: TrainingOptions,
    world: World,
    epoch: int,
    samples_done: int,
) -> int:
    """The index in the data set, or the number in the stream, of a row of the share."""
    if row < 0 or share.skipped:  # rows have moved up
        return -1
    if is_stream(dataset):
        batch = np.arange(samples_done, samples_done + share.num_all)
    else:
        batch = epoch_batches(dataset, options, epoch, samples_done)[0]
    num_parts = parts_of_batch(options)
    mine, _ = shards.shard_in_parts(batch, world.rank, world.size, num_parts)
    return int(mine[row]) if is_stream(dataset) else int(mine[row]) % len(dataset)


def _name(dataset: Any, index: int) -> str:
    """The URL or path of a sample, of data sets that know it; "" of others."""
    if index < 0:
        return ""
    name = getattr(subsets.opened(dataset), "name", None)
    if callable(name):
        return str(name(index))
    listed = getattr(dataset, "samples", None)  # of torchvision's folders: (path, class)
    first = listed[index][0] if isinstance(listed, list) and listed else None
    return first if isinstance(first, str) else ""
