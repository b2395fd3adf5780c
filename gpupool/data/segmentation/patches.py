"""Random patches of pairs of image and mask. Runs anywhere; imports torch when it decodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from gpupool.core.errors import OptionsError, SampleError
from gpupool.data.reading.normalization import Normalization
from gpupool.data.reading.samples import NUM_FETCH_THREADS, Draw, read_samples
from gpupool.data.reading.shards import Indices
from gpupool.data.segmentation.open_pairs import OpenPair, OpenPairs
from gpupool.data.segmentation.patch_order import patch_order

if TYPE_CHECKING:
    import torch

Transform = Callable[[Any, Any], tuple[Any, Any]]


class Pairs(Protocol):
    """What patches are taken from: images and masks of the same size, read in two parts."""

    def __len__(self) -> int: ...

    def num_bytes(self, index: int) -> int: ...

    def fetch(self, index: int) -> Any: ...

    def pixels(self, index: int, fetched: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 image (3, height, width) and integer mask (height, width)."""

    def name(self, index: int) -> str:
        """The printable URL of the image."""

    @property
    def normalization(self) -> Normalization | None:
        """What batches of images are to go through."""

    @property
    def classes(self) -> list[str]:
        """The names of the classes of pixels."""

    def with_classes(self, classes: Sequence[str]) -> Pairs:
        """The same pairs, counted by these names."""


class RandomPatches:
    """`per_image` patches of each pair, image and mask cut at the same place: a map-style dataset
    of `len(pairs) * per_image` samples (uint8 (3, height, width), int64 (height, width)).

    Where they are cut, and what `transform` draws, depends on `seed` and on the seed and epoch of
    the training and the index of the sample alone; outside of a training, on `seed` and the index.
    Patch p of pair i has the index `i * per_image + p`.

    In training, each pair is read once an epoch for all its patches (once by each rank for a few
    pairs at the end): `epoch_order` mixes `open_pairs` pairs in each batch, and so many are held in
    memory by all ranks together. Ranks share the reading best if their number divides `open_pairs`.

    An image smaller than the patch is an error: padding would train on pixels that are not there.
    """

    def __init__(
        self,
        pairs: Pairs,
        size: tuple[int, int],
        per_image: int,
        seed: int,
        open_pairs: int,
        transform: Transform | None,
    ) -> None:
        numbers = {"per_image": per_image, "open_pairs": open_pairs, "size": min(size)}
        for name, value in numbers.items():
            if value < 1:
                raise OptionsError(f"{name}={value} must be at least 1")
        self._pairs, self._size, self._per_image = pairs, size, per_image
        self._seed, self._num_open, self._transform = seed, open_pairs, transform
        # Of each lane the pair in use and the next one. Where a pair gives few patches, the fetch
        # threads are further ahead.
        capacity = 2 * open_pairs + NUM_FETCH_THREADS // per_image + 1
        self._open = OpenPairs(capacity, per_image, pairs.fetch, pairs.pixels)

    def __len__(self) -> int:
        return len(self._pairs) * self._per_image

    def __repr__(self) -> str:
        height, width = self._size
        return f"RandomPatches({len(self):,} of {height} x {width} from {self._pairs!r})"

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """One patch: image and mask, or what the transform made of them."""
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """The samples of a batch, in order; torch's DataLoader calls this."""
        return read_samples(self, indices)

    @property
    def classes(self) -> list[str]:
        """The names of the classes of pixels, by index; none where masks hold the indices."""
        return self._pairs.classes

    def with_classes(self, classes: Sequence[str]) -> Self:
        """The same patches, with the indices that their classes have among `classes`."""
        return self._of(self._pairs.with_classes(classes), self._transform)

    def with_transform(self, transform: Transform | None) -> Self:
        """The same patches, each passed through `transform(image, mask)`; None: as they are.

        It gets torchvision's tv_tensors.Image and Mask, so that one transform of
        torchvision.transforms.v2 changes both alike; pixels of no class are -100.
        """
        return self._of(self._pairs, transform)

    def epoch_order(self, seed: int, epoch: int, batch_size: int) -> Indices:
        """In which order an epoch takes the patches; see `patch_order`."""
        return patch_order(
            len(self._pairs), self._per_image, seed, epoch, batch_size, self._num_open
        )

    @property
    def normalization(self) -> Normalization | None:
        """That of the datastore, applied to batches on the device."""
        return self._pairs.normalization

    def num_bytes(self, index: int) -> int:
        """The part of its files that a patch stands for."""
        return self._pairs.num_bytes(self._pair_of(index)) // self._per_image

    def fetch(self, index: int) -> OpenPair:
        """The pair of files, read once for all patches of it."""
        return self._open.fetch(self._pair_of(index))

    def decode(self, index: int, fetched: OpenPair, draw: Draw | None = None) -> tuple[Any, Any]:
        """The patch. Raises SampleError if a file is damaged, or smaller than the patch."""
        from gpupool.data.datastores.joint_transforms import transformed
        from gpupool.data.reading.augmentation import keyed_draws

        image, mask = self._open.decode(fetched)
        given = draw or Draw(0, 0)
        # Both seeds count: other patches in another training, and with another seed of theirs.
        key = Draw(self._seed, given.seed).key(given.epoch)
        own = Draw(key, given.epoch)
        with keyed_draws(own, self._at(index)):
            rows, columns = self._box(image.shape[1:], fetched.number)
            # cloned, so that a patch does not keep the whole picture
            patch = image[:, rows, columns].clone(), mask[rows, columns].long()
            return transformed(self._transform, self._pairs.name(fetched.number), *patch)

    def _of(self, pairs: Pairs, transform: Transform | None) -> Self:
        return type(self)(pairs, self._size, self._per_image, self._seed, self._num_open, transform)

    def _box(self, shape: Sequence[int], number: int) -> tuple[slice, slice]:
        """Where to cut, drawn from torch's random numbers."""
        import torch

        if any(have < need for have, need in zip(shape, self._size, strict=True)):
            name = self._pairs.name(number)
            have, need = (" x ".join(map(str, size)) for size in (shape, self._size))
            raise SampleError(
                f"{name} has {have} pixels, fewer than a patch of {need}; take smaller patches, or "
                "leave such images out",
                name,
                "too small",
            )
        starts = [
            int(torch.randint(have - need + 1, ()))
            for have, need in zip(shape, self._size, strict=True)
        ]
        rows, columns = (
            slice(start, start + need) for start, need in zip(starts, self._size, strict=True)
        )
        return rows, columns

    def _at(self, index: int) -> int:
        """The index counted from 0. Raises IndexError beyond the end."""
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} patches")
        return place

    def _pair_of(self, index: int) -> int:
        return self._at(index) // self._per_image
