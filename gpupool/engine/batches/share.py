"""One rank's share of a global batch, and its way to the device. Runs on engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from gpupool.core.errors import DataError
from gpupool.core.options import datasets
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data.reading.normalization import Normalization
from gpupool.data.reading.samples import Skipped
from gpupool.data.reading.shards import Indices, shard_in_parts
from gpupool.data.reading.trees import first_tensor, map_tensors, remade
from gpupool.engine.batches.form import BatchForm
from gpupool.engine.group.forming import World

Scaling = tuple[Tensor, Tensor]  # mean and standard deviation of each channel, float64


class Dataset(Protocol):
    """A map-style data set: what `torch.utils.data.Dataset` asks for."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's share of a global batch.

    A rank whose share is empty still takes part, because every rank must take every step: it holds
    one sample with `num_here` 0, which gives its loss the weight 0. `num_all` counts the samples of
    the global batch, also those in `skipped`, which could not be read. `inputs` and `targets` are
    those of a `Batch`; on the device as `BatchForm.halves` gives them. `is_last`: no other batch of
    the epoch comes after it. `part_sizes`: how many of the samples belong to each part of the
    global batch, where it was cut into parts before it was divided.
    """

    inputs: Any
    targets: Any
    num_here: int
    num_all: int
    wait_s: float = 0.0
    skipped: tuple[Skipped, ...] = ()
    is_last: bool = False
    part_sizes: tuple[int, ...] = ()


def num_samples(dataset: Dataset) -> int:
    """How many samples an epoch has; 0 if that is not known, of a stream without `len()`."""
    try:
        return len(dataset)
    except TypeError:  # also of a map-style data set whose `__len__` is wrong: that is an error
        if datasets.is_stream(dataset):
            return 0
        raise


def cut_share(
    batch: Indices, world: World, options: TrainingOptions
) -> tuple[Indices, tuple[int, ...]]:
    """What this rank gets of a global batch, and its `part_sizes`."""
    # With batch norms over all ranks a micro-batch must have the same samples for any number of
    # ranks. Without them any cut gives the same gradient, so each rank cuts its own share.
    num_parts = options.accumulate if options.batch_norm == "sync" else 1
    return shard_in_parts(batch, world.rank, world.size, num_parts)


def on_device(
    share: Share, world: World, form: BatchForm, scaling: Scaling | None
) -> tuple[Any, Any]:
    """What the network is called with, and what the loss gets, of a share that was read."""
    inputs = _moved("inputs", share.inputs, world.device)
    if share.targets is not None:
        targets = _moved("targets", share.targets, world.device)
        return form.halves(as_input(inputs, scaling), targets)
    if isinstance(inputs, Mapping):  # labels may be uint8 as well
        columns = {
            name: part if name in datasets.LABELS else as_input(part, scaling)
            for name, part in inputs.items()
        }
        return form.halves(remade(inputs, columns), None)
    chosen, batch = form.halves(inputs, None)
    return as_input(chosen, scaling), batch


def _moved(name: str, half: Any, device: torch.device) -> Any:
    """Inputs or targets on the device. Raises DataError if they have no tensor.

    An object of the user's goes there by its own `to(device)`, as a batch of graphs does.
    """
    if first_tensor(half) is not None or type(half) is dict:
        # From pinned memory the host does not wait for the copy.
        return map_tensors(partial(Tensor.to, device=device, non_blocking=True), half)
    if callable(getattr(half, "to", None)):
        return half.to(device)
    raise DataError(
        f"the {name} of a batch are a {type(half).__name__}, not a tensor; change what the "
        "transform or the data set returns",
        "no tensor",
    )


def as_input(images: Any, scaling: Scaling | None = None) -> Any:
    """uint8 images as float32 in 0..1, made on the device; anything else as it is; contiguous.

    Floating-point ones too are scaled after that. Of a dict or list that is done with each tensor
    in it. Raises DataError if the scaling is of other channels.
    """
    if not isinstance(images, Tensor):
        return map_tensors(partial(as_input, scaling=scaling), images)
    if images.dtype == torch.uint8:  # a quarter of the bytes have crossed to the device
        images = images.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    images = images.contiguous()
    if scaling is None:
        return images
    if len(scaling[0]) > 1 and images.shape[1] != len(scaling[0]):  # torch would make 3 of one
        raise DataError(
            f"the normalization has {len(scaling[0])} channels, the images have "
            f"{images.shape[1]}; give with_normalization one number each, or as many as the images "
            "have channels",
            "channels",
        )
    # In the inputs' own precision: float64 inputs stay float64.
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
