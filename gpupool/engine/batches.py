"""This rank's share of every global batch, on its device. Runs on engines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpupool.core.errors import DataError, TrainingError
from gpupool.core.options import TrainingOptions
from gpupool.data import nested, shards
from gpupool.data.collate import Batch
from gpupool.data.loader import load_batches
from gpupool.data.samples import Draw, Skipped
from gpupool.engine import here
from gpupool.engine.group import World

Indices = npt.NDArray[np.int64]
Normalization = tuple[Tensor, Tensor]  # mean and standard deviation of each channel

_MAX_STAND_INS = 1000  # samples that are tried when not one of a share could be read


class Dataset(Protocol):
    """A map-style data set: what `torch.utils.data.Dataset` asks for."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's share of a global batch, on its device.

    A rank whose share is empty still takes part, because every rank must take every step: it holds
    one sample with `num_here` 0, which gives its loss the weight 0. `num_all` counts the samples of
    the global batch, also those in `skipped`, which could not be read.
    """

    inputs: Tensor
    targets: Tensor
    num_here: int
    num_all: int
    wait_s: float
    skipped: tuple[Skipped, ...] = ()


def epoch_batches(
    dataset: Dataset, options: TrainingOptions, epoch: int, samples_done: int = 0
) -> list[Indices]:
    """The global batches of an epoch as sample indices: the same on every rank, for any ranks.

    `samples_done` of the epoch are left out: what remains is the same, whatever the number of ranks
    was before or is now.

    Raises TrainingError if the data set orders its epochs itself, and not each sample comes once.
    """
    shuffled_epoch = 1 if options.shuffle == "once" else epoch
    shuffles = options.shuffle != "never"
    if shuffles and hasattr(dataset, "epoch_order"):
        order = dataset.epoch_order(options.seed, shuffled_epoch, options.batch_size)
        if not shards.is_permutation(order, len(dataset)):
            raise TrainingError(
                f"epoch_order() of the {type(dataset).__name__} does not name each of its "
                f"{len(dataset):,} samples once; correct it, or take it away."
            )
    else:
        order = shards.epoch_order(len(dataset), options.seed, shuffled_epoch, shuffle=shuffles)
    return shards.global_batches(order, options.batch_size, samples_done)


def load_shares(
    dataset: Dataset,
    batches: Sequence[Indices],
    world: World,
    draw: Draw | None = None,
    *,
    skip: bool = False,
) -> Iterator[Share]:
    """This rank's share of each global batch, read ahead; as many on every rank."""
    mine = [shards.shard(batch, world.rank, world.size) for batch in batches]
    dataset = nested.opened(dataset)
    loading = load_batches(
        dataset, mine, depth=read_ahead(), device=world.device, draw=draw, skip=skip
    )
    normalization = normalization_of(dataset, world.device)
    may_lack = skip or not all(map(len, mine))
    stand_in: tuple[Tensor, ...] | None = None
    with closing(loading):  # a traceback may hold this frame
        asked = time.perf_counter()
        for batch, loaded in zip(batches, loading, strict=True):
            loaded = loaded or Batch(None, None, 0)
            inputs, targets = loaded.inputs, loaded.targets
            if may_lack and stand_in is None:
                whole = loaded
                if not loaded.num:
                    whole = _one_sample(dataset, batch, world.device, skip=skip)
                halves = ("inputs", whole.inputs), ("targets", whole.targets)
                stand_in = tuple(moved(*half, world.device)[:1].clone() for half in halves)
            if loaded.num == 0 and stand_in is not None:
                inputs, targets = stand_in
            yield Share(
                inputs=as_input(moved("inputs", inputs, world.device), normalization),
                targets=moved("targets", targets, world.device),
                num_here=loaded.num,
                num_all=len(batch),
                wait_s=time.perf_counter() - asked,
                skipped=loaded.skipped,
            )
            asked = time.perf_counter()


def loss_weight(
    share: Share, world: World, num_counted: int | Tensor, *, skip: bool
) -> float | Tensor:
    """What this rank's mean loss counts, so that the ranks' average is the mean over all of them.

    `num_counted` is over how much it is a mean. Where that, or how many samples are skipped, only
    the data tell, it is summed over the ranks, and never read from the device: no rank waits for
    it. If none is left, every rank's loss counts nothing.
    """
    if isinstance(num_counted, int):
        if not skip:
            return num_counted * world.size / share.num_all
        # `full` is computed on the device; `tensor` would be copied there, and waited for.
        num_counted = torch.full((), num_counted, dtype=torch.float64, device=world.device)
    num_in_all = world.sum(num_counted.clone()).clamp(min=1)
    return num_counted * world.size / num_in_all


def read_ahead() -> int:
    """Batches to read ahead: none in the notebook's own process, where breakpoints are meant."""
    return 0 if here.is_inline() else 2


def moved(name: str, batch: Any, device: torch.device) -> Tensor:
    """The inputs or targets of a batch on the device. Raises DataError if they are no tensor."""
    if not isinstance(batch, Tensor):
        raise DataError(
            f"the {name} of a batch are a {type(batch).__name__}, not a tensor; change what the "
            "transform or the data set returns"
        )
    return batch.to(device, non_blocking=True)


def as_input(images: Tensor, normalization: Normalization | None = None) -> Tensor:
    """uint8 images as float32 in 0..1, made on the device; anything else as it is; contiguous.

    `normalization` is applied after that, to floating-point images too. Raises DataError if it is
    of other channels.
    """
    if images.dtype == torch.uint8:
        images = images.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    images = images.contiguous()
    if normalization is None:
        return images
    mean, std = normalization
    if len(mean) > 1 and images.shape[1] != len(mean):  # torch would make three channels of one
        raise DataError(
            f"the normalization has {len(mean)} channels, the images have {images.shape[1]}; give "
            "with_normalization one number each, or as many as the images have channels"
        )
    return (images - mean).div_(std)


def normalization_of(dataset: Dataset, device: torch.device) -> Normalization | None:
    """The mean and standard deviation of each channel that a data set asks for, on the device."""
    asked = getattr(dataset, "normalization", None)
    if asked is None:
        return None
    mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in asked)
    return mean, std


def _one_sample(dataset: Dataset, batch: Indices, device: torch.device, *, skip: bool) -> Batch:
    """Any sample, as a batch of one, for a rank that has none of its own."""
    others = islice(chain(batch, range(len(dataset))), _MAX_STAND_INS if skip else 1)
    tried = [np.array([index], dtype=np.int64) for index in others]
    for loaded in load_batches(dataset, tried, depth=0, device=device, skip=skip):
        if loaded is not None and loaded.num:
            return loaded
    raise TrainingError(
        f"none of {len(tried):,} samples could be read, so there is nothing to train on; "
        "on_error='raise' tells what is wrong with the first of them."
    )
