"""Data sets that stand for others. Runs anywhere; imports torch.

torch's Subset and ConcatDataset of data sets of ours are read as those are: they hide that samples
can be fetched many at once, what keys their random numbers, and their normalization. Data without
targets is a data set whose targets count nowhere.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from gpupool.core.errors import DataError
from gpupool.core.options.datasets import NO_CLASS
from gpupool.data.reading.augmentation import keyed_draws
from gpupool.data.reading.samples import (
    Draw,
    InParts,
    Normalization,
    Samples,
    apply_transform,
    numbered,
)
from gpupool.data.stores.folder import FileRef, Folder


def opened(dataset: Any) -> Any:
    """A `Samples` for a Subset or ConcatDataset of such, also nested; anything else as it is."""
    if type(dataset) not in (Subset, ConcatDataset):
        return dataset
    return Nested(dataset) if all(isinstance(one, Samples) for one in parts(dataset)) else dataset


def parts(dataset: Any) -> list[Any]:
    """The data sets that a sample of this one may be of, with `leaf`."""
    # Not of derived classes, which may change what a sample is.
    if type(dataset) is Subset:
        return parts(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return [leaf for part in dataset.datasets for leaf in parts(part)]
    return [dataset]


def leaf(dataset: Any, index: int, draw: Draw | None = None) -> tuple[Any, int, Draw | None]:
    """Of which data set a sample is, where there, and what keys its random numbers.

    Those of the same row of two parts differ.
    """
    while True:
        if type(dataset) is Subset:
            dataset, index = dataset.dataset, int(dataset.indices[index])
        elif type(dataset) is ConcatDataset:
            number = bisect_right(dataset.cumulative_sizes, index)
            index -= dataset.cumulative_sizes[number - 1] if number else 0
            dataset, draw = dataset.datasets[number], numbered(draw, number)
        else:
            return dataset, index, draw


@dataclass(frozen=True, eq=False)
class Nested(InParts):
    whole: Any

    @property
    def normalization(self) -> Normalization | None:
        asked = {getattr(part, "normalization", None) for part in parts(self.whole)}
        if len(asked) > 1:
            raise DataError(
                "the parts of a ConcatDataset have another normalization each; give them the same "
                "by with_normalization",
                "other settings",
            )
        return asked.pop()

    def __len__(self) -> int:
        return len(self.whole)

    def fetch(self, index: int) -> Any:
        part, row, _ = leaf(self.whole, index)
        return part.fetch(row)

    def decode(self, index: int, fetched: Any, draw: Draw | None) -> Any:
        part, row, own = leaf(self.whole, index, draw)
        return part.decode(row, fetched, own)


def of_inputs(given: Any, shape: Sequence[int], transform: Callable[..., Any] | None = None) -> Any:
    """A data set for a tensor, a list of pictures or URLs; other data sets as they are.

    Pictures are decoded as in training. They go through `transform`, or get the height and width of
    `shape`, which is that of the network's inputs: (channels, height, width), if it is known.
    """
    if isinstance(given, Tensor):
        # One sample, of a network whose inputs are known.
        given = given[None] if shape and tuple(given.shape) == tuple(shape) else given
        if transform is None and not (given.dtype == torch.uint8 and given.ndim == 4):
            return TensorDataset(given, torch.full((len(given),), NO_CLASS))
        given = list(given)
    prepare = transform or (partial(resized, shape=shape) if len(shape) == 3 else None)
    if isinstance(given, (list, tuple)) and all(map(_is_picture, given)):
        return Pictures(given, prepare)
    own: Any = opened(given)
    if isinstance(own, Samples):
        change = getattr(own, "with_transform", None)
        is_unlabelled = not getattr(own, "classes", True) and not hasattr(own, "mask_paths")
        is_new = is_unlabelled and change and getattr(own, "transform", None) is None
        return change(prepare) if is_new and change and prepare else own
    return given


def resized(image: Tensor, shape: Sequence[int]) -> Tensor:
    """A picture (channels, height, width) in the height and width of `shape`."""
    if image.shape[1:] == torch.Size(shape[1:]):
        return image
    from torchvision.transforms.v2 import functional  # a rank starts without it

    sized: Tensor = functional.resize(image, list(shape[1:]), antialias=True)
    return sized


class Pictures(InParts):
    """Pictures in memory or in files, as `Samples`: (uint8 (3, height, width), -100)."""

    def __init__(self, items: Sequence[Any], transform: Callable[..., Any] | None) -> None:
        self._items, self._transform = items, transform

    def __len__(self) -> int:
        return len(self._items)

    def fetch(self, index: int) -> Any:
        """What is in memory, or the name and the bytes of a file."""
        item = self._items[index]
        if not isinstance(item, (str, os.PathLike)):
            return item
        parent, slash, file = os.fspath(item).rpartition("/")
        folder = Folder(parent or slash or ".")
        return folder.name(file), folder.read(FileRef(file, 0))

    def decode(self, index: int, fetched: Any, draw: Draw | None) -> tuple[Any, int]:
        name = f"picture {index}"
        if isinstance(fetched, tuple):
            from gpupool.data.reading.decode import decode

            name, data = fetched
            image = decode(data, name)
        else:
            image = fetched if isinstance(fetched, Tensor) else _pixels(fetched)
        if self._transform is not None:
            with keyed_draws(draw, index):
                image = apply_transform(self._transform, name, image)
        return image, NO_CLASS


def _is_picture(item: Any) -> bool:
    if isinstance(item, (Tensor, np.ndarray)):
        return item.ndim in (2, 3) and item.dtype in (torch.uint8, np.uint8)
    return isinstance(item, (str, os.PathLike)) or hasattr(item, "convert")


def _pixels(picture: Any) -> Tensor:
    """An image of Pillow, or an array (height, width[, channels]), as the decoder gives them."""
    if hasattr(picture, "convert"):
        from PIL import ImageOps

        picture = ImageOps.exif_transpose(picture).convert("RGB")
    pixels = np.array(picture)
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[:, :, None], 3, axis=2)
    return torch.from_numpy(pixels).permute(2, 0, 1)
