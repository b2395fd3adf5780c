"""Random patches of pairs of image and mask. Runs anywhere; imports torch when it decodes.

A pair gives many patches. Patches of one pair look alike, so a batch must mix pairs; but all pairs
do not fit into memory, and each is to be read by few ranks. So an epoch goes through groups of
`open_pairs` pairs, whose patches are mixed, and each batch is sorted by pair: a rank's share of it
is contiguous, and meets few of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gpupool.core.errors import DataError, OptionsError, SampleError
from gpupool.data.datastores.base import Sample
from gpupool.data.reading.samples import (
    NUM_FETCH_THREADS,
    Draw,
    InParts,
    Normalization,
    apply_transform,
)
from gpupool.data.reading.shards import Indices, global_batches, keyed_generator

if TYPE_CHECKING:
    import torch


class RandomPatches(InParts):
    """`per_image` patches of each pair, image and mask cut at the same place: a map-style dataset
    of samples (uint8 (3, height, width), int64 (height, width)).

    Where they are cut, and what the transform of the pairs draws, depends on the seed and epoch of
    the training and the index of the sample alone; outside of a training, on the index.
    Patch p of pair i has the index `i * per_image + p`.

    An image smaller than the patch is an error: padding would train on pixels that are not there.
    """

    def __init__(self, pairs: Any, size: tuple[int, int], per_image: int, open_pairs: int) -> None:
        numbers = {"per_image": per_image, "open_pairs": open_pairs, "size": min(size)}
        for name, value in numbers.items():
            if value < 1:
                raise OptionsError(f"{name}={value} must be at least 1")
        self._pairs, self._size = pairs, size
        self._per_image, self._num_open = per_image, open_pairs
        # Where a pair gives few patches, the fetch threads are further ahead than a group.
        self._open = _OpenPairs(pairs, open_pairs + NUM_FETCH_THREADS // per_image + 1)

    def __len__(self) -> int:
        return len(self._pairs) * self._per_image

    def __repr__(self) -> str:
        height, width = self._size
        return f"RandomPatches({len(self):,} of {height} x {width} from {self._pairs!r})"

    @property
    def classes(self) -> list[str]:
        """The names of the classes of pixels, by index; none where masks hold the indices."""
        return list(self._pairs.classes)

    @property
    def normalization(self) -> Normalization | None:
        """That of the datastore, applied to batches on the device."""
        return cast(Normalization | None, self._pairs.normalization)

    def epoch_order(self, seed: int, epoch: int, batch_size: int) -> Indices:
        draws = keyed_generator(seed, epoch)
        pairs = draws.permutation(len(self._pairs)).astype(np.int64)
        patches = pairs[:, None] * self._per_image + np.arange(self._per_image)
        groups = [
            draws.permutation(patches[start : start + self._num_open].ravel())
            for start in range(0, len(pairs), self._num_open)
        ]
        order = np.concatenate([patches[:0].ravel(), *groups])
        for batch in global_batches(order, batch_size):
            batch.sort()  # a view of `order`; indices of a pair follow each other
        return order

    def fetch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The pixels of the pair, read and decoded once for all patches of it that come soon."""
        return self._open.pixels(self._pair_of(index))

    def decode(
        self, index: int, fetched: tuple[torch.Tensor, torch.Tensor], draw: Draw | None = None
    ) -> Sample:
        import torch

        from gpupool.data.reading.augmentation import keyed_draws

        image, mask = fetched
        name = self._pairs.name(self._pair_of(index))
        have, need = image.shape[1:], self._size
        if have[0] < need[0] or have[1] < need[1]:
            has, needs = (" x ".join(map(str, sides)) for sides in (have, need))
            raise SampleError(
                f"{name} has {has} pixels, fewer than a patch of {needs}; take smaller patches, or "
                "leave such images out",
                name,
                "too small",
            )
        with keyed_draws(draw or Draw(0, 0), index % len(self)):
            top, left = (int(torch.randint(have[i] - need[i] + 1, ())) for i in (0, 1))
            rows, columns = slice(top, top + need[0]), slice(left, left + need[1])
            # cloned, so that a patch does not keep the whole picture
            patch = image[:, rows, columns].clone(), mask[rows, columns].long()
            return transformed(self._pairs.transform, name, *patch)

    def _pair_of(self, index: int) -> int:
        return range(len(self))[index] // self._per_image


class _OpenPairs:
    """The pixels of the `capacity` pairs that were asked for last; one thread reads each, while
    others that need it wait. Pickles without them."""

    def __init__(self, pairs: Any, capacity: int) -> None:
        self._pairs, self._capacity = pairs, capacity
        self._open: dict[int, Future[Sample]] = {}  # the last one asked for is the last
        self._lock = threading.Lock()
        # Many wait for the store, but no more decode than there are cores: those of the rank. The
        # training's own thread would else get its turn tens of milliseconds late.
        cores = os.environ.get("OMP_NUM_THREADS", "")
        self._permits = threading.Semaphore(max(1, int(cores) if cores.isdecimal() else 4))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._pairs, self._capacity)

    def pixels(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Image and mask. Where reading raises, the next call tries again."""
        with self._lock:
            known = self._open.pop(number, None)
            pair = self._open[number] = known or Future()
            if len(self._open) > self._capacity:
                del self._open[next(iter(self._open))]  # whoever uses it has it
        if known is None:
            try:
                fetched = self._pairs.fetch(number)
                with self._permits:
                    pair.set_result(self._pairs.pixels(number, fetched))
            except BaseException as error:
                with self._lock:
                    self._open.pop(number, None)
                pair.set_exception(error)
        return pair.result()


def transformed(
    transform: Callable[[Any, Any], Any] | None, name: str, image: torch.Tensor, mask: torch.Tensor
) -> tuple[Any, Any]:
    """Image and mask, as plain tensors, after `transform(image, mask)`, which gets tv_tensors."""
    if transform is None:
        return image, mask
    import torch
    from torchvision import tv_tensors

    # By their types torchvision v2 moves both alike, and changes colours of the image alone.
    made = apply_transform(transform, name, tv_tensors.Image(image), tv_tensors.Mask(mask))
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise DataError(
            f"the transform gave {type(made).__name__}; a transform of image and mask must give "
            "a pair (image, mask)",
            "type",
        )
    first, second = (
        one.as_subclass(torch.Tensor) if isinstance(one, tv_tensors.TVTensor) else one
        for one in made
    )
    return first, second
