"""This rank's share of every global batch, on its device. Runs on engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpupool.core.options import TrainingOptions
from gpupool.data import shards
from gpupool.data.loader import load_batches
from gpupool.engine import here
from gpupool.engine.group import World

Indices = npt.NDArray[np.int64]


class Dataset(Protocol):
    """A map-style data set: what `torch.utils.data.Dataset` asks for."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's share of a global batch, on its device.

    A rank whose share is empty still takes part, because every rank must take every step: it holds
    one sample of the batch with `num_here` 0, which gives its loss the weight 0.
    """

    inputs: Tensor
    targets: Tensor
    num_here: int
    num_all: int
    wait_s: float


def epoch_batches(num_samples: int, options: TrainingOptions, epoch: int) -> list[Indices]:
    """The global batches of an epoch as sample indices: the same on every rank, for any ranks."""
    shuffled_epoch = 1 if options.shuffle == "once" else epoch
    order = shards.epoch_order(
        num_samples, options.seed, shuffled_epoch, shuffle=options.shuffle != "never"
    )
    return [order[i : i + options.batch_size] for i in range(0, num_samples, options.batch_size)]


def load_shares(dataset: Dataset, batches: list[Indices], world: World) -> Iterator[Share]:
    mine = [shards.shard(batch, world.rank, world.size) for batch in batches]
    wanted = [own if len(own) else batch[:1] for own, batch in zip(mine, batches, strict=True)]
    loading = load_batches(dataset, wanted, depth=read_ahead(), device=world.device)
    asked = time.perf_counter()
    for own, batch, loaded in zip(mine, batches, loading, strict=True):
        assert loaded is not None  # no entry of `wanted` is empty
        inputs, targets = loaded
        yield Share(
            inputs=as_input(inputs.to(world.device, non_blocking=True)),
            targets=targets.to(world.device, non_blocking=True),
            num_here=len(own),
            num_all=len(batch),
            wait_s=time.perf_counter() - asked,
        )
        asked = time.perf_counter()


def read_ahead() -> int:
    """Batches to read ahead: none in the notebook's own process, where breakpoints are meant."""
    return 0 if here.is_inline() else 2


def as_input(images: Tensor) -> Tensor:
    """uint8 images as float32 in 0..1, made on the device; anything else as it is."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images
