"""This rank's share of every global batch, on its device. Runs on engines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpupool.core.datasets import is_stream
from gpupool.core.errors import DataError, TrainingError
from gpupool.core.training_options import TrainingOptions
from gpupool.data import nested, shards
from gpupool.data.collate import Batch
from gpupool.data.loader import load_batches
from gpupool.data.normalization import Normalization
from gpupool.data.samples import Draw, Skipped
from gpupool.data.waiting import awaited
from gpupool.engine import here
from gpupool.engine.group import World
from gpupool.engine.trees import first_tensor, map_tensors

Indices = npt.NDArray[np.int64]
Scaling = tuple[Tensor, Tensor]  # mean and standard deviation of each channel, float64

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
    the global batch, also those in `skipped`, which could not be read. `inputs` and `targets` are
    tensors, or dicts, lists and named tuples of them; torch collates tuples to lists. `is_last`:
    no other batch of the epoch comes after it. `part_sizes`: how many of the samples belong to each
    part of the global batch, where it was cut into parts before it was divided.
    """

    inputs: Any
    targets: Any
    num_here: int
    num_all: int
    wait_s: float
    skipped: tuple[Skipped, ...] = ()
    is_last: bool = False
    part_sizes: tuple[int, ...] = ()


def num_samples(dataset: Dataset) -> int:
    """How many samples an epoch has; 0 if that is not known, of a stream without `len()`."""
    try:
        return len(dataset)
    except TypeError:
        if is_stream(dataset):
            return 0
        raise


def epoch_shares(
    dataset: Dataset,
    options: TrainingOptions,
    world: World,
    epoch: int,
    samples_done: int = 0,
    draw: Draw | None = None,
    normalization: Normalization | None = None,
) -> Iterator[Share]:
    """This rank's share of each global batch of an epoch, after its first `samples_done` samples.

    `draw` keys the random numbers of augmentation: those of (seed, epoch) unless given. Inputs get
    the `normalization`, or the one that the data set asks for.
    """
    draw = draw or Draw(options.seed, epoch)
    if is_stream(dataset):
        from gpupool.engine.stream import stream_shares  # it makes shares as this file does

        return stream_shares(dataset, options, world, epoch, samples_done, draw, normalization)
    batches = epoch_batches(dataset, options, epoch, samples_done)
    return load_shares(
        dataset,
        batches,
        world,
        draw,
        skip=options.on_error == "skip",
        load=options.rank_load,
        normalization=normalization,
        num_parts=parts_of_batch(options),
    )


def parts_of_batch(options: TrainingOptions) -> int:
    """Into how many parts a global batch is cut before the ranks divide it.

    With batch norms over all ranks these must have the same samples for any number of ranks.
    """
    return options.accumulate if options.batch_norm == "sync" else 1


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
    load: Sequence[float] | None = None,
    normalization: Normalization | None = None,
    num_parts: int = 1,
) -> Iterator[Share]:
    """This rank's share of each global batch, read ahead; as many on every rank.

    `load` is how much each rank gets relative to the others, `num_parts` into how many parts a
    batch is cut before.
    """
    cuts = [
        shards.shard_in_parts(batch, world.rank, world.size, num_parts, load) for batch in batches
    ]
    mine = [share for share, _ in cuts]
    dataset = nested.opened(dataset)
    loading = load_batches(
        dataset, mine, depth=read_ahead(), device=world.device, draw=draw, skip=skip
    )
    scaling = normalization_of(dataset, world.device, normalization)
    may_lack = skip or not all(map(len, mine))
    stand_in: tuple[Any, ...] | None = None
    with closing(loading):  # a traceback may hold this frame
        asked = time.perf_counter()
        pairs = zip(batches, awaited(loading), strict=True)
        for number, (batch, loaded) in enumerate(pairs, start=1):
            loaded = loaded or Batch(None, None, 0)
            inputs, targets = loaded.inputs, loaded.targets
            if may_lack and stand_in is None:
                whole = loaded
                if not loaded.num:
                    whole = _one_sample(dataset, batch, world.device, skip=skip)
                stand_in = one_of(whole, world.device)
            if loaded.num == 0 and stand_in is not None:
                inputs, targets = stand_in
            yield Share(
                inputs=as_input(moved("inputs", inputs, world.device), scaling),
                targets=moved("targets", targets, world.device),
                num_here=loaded.num,
                num_all=len(batch),
                wait_s=time.perf_counter() - asked,
                skipped=loaded.skipped,
                is_last=number == len(batches),
                part_sizes=cuts[number - 1][1],
            )
            asked = time.perf_counter()


def read_ahead() -> int:
    """Batches to read ahead: none in the notebook's own process, where breakpoints are meant."""
    return 0 if here.is_inline() else 2


def moved(name: str, batch: Any, device: torch.device) -> Any:
    """The inputs or targets of a batch on the device. Raises DataError if they have no tensor."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if first_tensor(batch) is None:
        raise DataError(
            f"the {name} of a batch are a {type(batch).__name__}, not a tensor; change what the "
            "transform or the data set returns"
        )
    return map_tensors(partial(Tensor.to, device=device, non_blocking=True), batch)


def one_of(batch: Batch, device: torch.device) -> tuple[Any, Any]:
    """Inputs and targets of the first sample of a batch, as a batch of one."""
    halves = ("inputs", batch.inputs), ("targets", batch.targets)
    inputs, targets = (
        map_tensors(lambda t: t[:1].clone(), moved(*half, device)) for half in halves
    )
    return inputs, targets


def as_input(images: Any, scaling: Scaling | None = None) -> Any:
    """uint8 images as float32 in 0..1, made on the device; anything else as it is; contiguous.

    Floating-point ones too are scaled after that. Of a dict or list that is done with each tensor
    in it. Raises DataError if the scaling is of other channels.
    """
    if not isinstance(images, Tensor):
        return map_tensors(partial(as_input, scaling=scaling), images)
    if images.dtype == torch.uint8:
        images = images.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    images = images.contiguous()
    if scaling is None:
        return images
    if len(scaling[0]) > 1 and images.shape[1] != len(scaling[0]):  # torch would make 3 of one
        raise DataError(
            f"the normalization has {len(scaling[0])} channels, the images have "
            f"{images.shape[1]}; give with_normalization one number each, or as many as the images "
            "have channels"
        )
    mean, std = (one.to(images.dtype).view(-1, *[1] * (images.ndim - 2)) for one in scaling)
    return (images - mean).div_(std)


def normalization_of(
    dataset: Dataset, device: torch.device, normalization: Normalization | None = None
) -> Scaling | None:
    """A normalization, or the one that a data set asks for, on the device; None without any."""
    asked = normalization or getattr(dataset, "normalization", None)
    if asked is None:
        return None
    mean, std = (torch.tensor(values, dtype=torch.float64, device=device) for values in asked)
    return mean, std


def _one_sample(dataset: Dataset, batch: Indices, device: torch.device, *, skip: bool) -> Batch:
    """Any sample, as a batch of one, for a rank that has none of its own."""
    others = islice(chain(batch, range(len(dataset))), _MAX_STAND_INS if skip else 1)
    tried = [np.array([index], dtype=np.int64) for index in others]
    for loaded in awaited(load_batches(dataset, tried, depth=0, device=device, skip=skip)):
        if loaded is not None and loaded.num:
            return loaded
    raise TrainingError(
        f"none of {len(tried):,} samples could be read, so there is nothing to train on; "
        "on_error='raise' tells what is wrong with the first of them."
    )
