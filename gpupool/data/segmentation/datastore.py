"""Pairs of an image and a mask, for semantic segmentation. Runs anywhere; no torch at import."""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import DataError, OptionsError, SampleError
from gpupool.core.options.datasets import NO_CLASS
from gpupool.core.progress import progress
from gpupool.data.datastores.base import Datastore, Sample
from gpupool.data.datastores.images import IMAGE_EXTENSIONS, find_files, table
from gpupool.data.datastores.views import Preview, make_preview
from gpupool.data.reading.samples import Draw, tried
from gpupool.data.segmentation.patches import RandomPatches, transformed
from gpupool.data.stores.folder import FileRef, Folder

if TYPE_CHECKING:
    import torch
    from PIL import Image

MASK_EXTENSIONS = (".png", ".tif", ".tiff", ".bmp", ".webp")
_SHOWN = 3
_NUM_IDS = 2**16
_NUM_COLOURS = 2**24
Match = str | Callable[[str], str]


class SegmentationDatastore(Datastore):
    """Images and their masks; immutable, every method gives a new datastore.

        ds = SegmentationDatastore("s3://streets/images", "s3://streets/masks",
                                   classes={"road": 7, "car": [26, 27]})
        image, mask = ds[0]      # uint8 (3, height, width); int64 (height, width), class or -100
        patches = ds.random_patches(512, per_image=16)

    Pixels of no class are -100, which torch's cross_entropy leaves out. A transform gets image and
    mask as torchvision's tv_tensors, so one of torchvision.transforms.v2 changes both alike. Where
    it fills, masks need `fill={tv_tensors.Image: 0, tv_tensors.Mask: -100}`.

    Args:
        images_url: any fsspec URL, or a path.
        masks_url: of the masks: PNG and other files without loss, of the size of their images.
        classes: what pixels mean, in the order of the indices they get. Names to ids (an int, or a
            list of them) for grey and palette masks; names to colours (a tuple of red, green and
            blue, or a list of such) for any. None: pixels hold the indices themselves.
        match: which mask belongs to an image: "stem", whose path below `masks_url` is the same up
            to the extension, or a function from the path of an image or mask to what both share.
        image_extensions, mask_extensions: of the files to take, in any case.
        storage_options: for the file systems of both.

    Raises as `ImageDatastore`, and DataError if any has no partner.
    """

    mask_classes: MaskClasses

    def __init__(
        self,
        images_url: str,
        masks_url: str,
        *,
        classes: Mapping[str, Any] | None = None,
        match: Match = "stem",
        image_extensions: Sequence[str] = IMAGE_EXTENSIONS,
        mask_extensions: Sequence[str] = MASK_EXTENSIONS,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.mask_classes = MaskClasses.of(classes)
        options = dict(storage_options or {})
        folders = Folder(images_url, options), Folder(masks_url, options)
        images = find_files(folders[0], image_extensions, "images")
        masks = find_files(folders[1], mask_extensions, "masks")
        pairs = tuple(map(table, folders, _matched(folders, (images, masks), match)))
        # Each sample has a label; here all have the one without a name.
        super().__init__(pairs, np.zeros(len(images), np.int64), ("",))

    @property
    def classes(self) -> list[str]:
        """The names of the classes of pixels, by index; none where masks hold the indices."""
        return list(self.mask_classes.names)

    @property
    def mask_paths(self) -> list[str]:
        """The URL of each mask."""
        return list(map(self.files[1].url, range(len(self))))

    def __repr__(self) -> str:
        classes = f"{len(self.classes)} classes, " if self.classes else ""
        return f"{type(self).__name__}({len(self):,} pairs, {classes}{self.url})"

    def fetch(self, index: int) -> tuple[bytes, ...]:
        row = self._row(index)
        return tuple(files.read(row) for files in self.files)

    def pixels(self, index: int, fetched: tuple[bytes, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Image (3, height, width) uint8 and mask (height, width) int16, of what was fetched."""
        from gpupool.data.reading.decode import decode

        mask_name = self.files[1].url(self._row(index))
        image = decode(fetched[0], self.name(index))
        mask = decode_mask(fetched[1], mask_name, self.mask_classes)
        if image.shape[1:] != mask.shape:
            have, has = (" x ".join(map(str, size)) for size in (image.shape[1:], mask.shape))
            raise SampleError(
                f"{mask_name} has {has} pixels, its image {self.name(index)} has {have}; "
                "store them in one size",
                mask_name,
            )
        return image, mask

    def decode(self, index: int, fetched: Any, draw: Draw | None = None) -> Sample:
        from gpupool.data.reading.augmentation import keyed_draws

        image, mask = self.pixels(index, fetched)
        with keyed_draws(draw, index):
            # int16 takes a quarter of the memory up to here; torch's losses want int64.
            return transformed(self.transform, self.name(index), image, mask.long())

    def with_classes(self, classes: Sequence[str]) -> Self:
        """The same pairs. Raises OptionsError if `classes` do not begin with theirs, in order."""
        if not self.classes or list(classes[: len(self.classes)]) != self.classes:
            own = self.classes or "the numbers they hold"
            raise OptionsError(
                f"the masks count their classes as {own}, not as {list(classes)!r}; make the "
                "datastore with classes= in that order"
            )
        return self

    def count_each_label(self) -> dict[str, int]:
        """How many pixels each class has, in the order of `classes`; reads every mask once.

        Where masks hold indices, their names are "0", "1", ... up to the largest there is. Pixels
        of no class are not counted.
        """
        masks, total = self.files[1], np.zeros(_NUM_IDS, np.int64)

        def count(row: int, data: bytes) -> Any:
            pixels = decode_mask(data, masks.url(row), self.mask_classes).numpy()
            return np.bincount(pixels[pixels != NO_CLASS])

        with progress("Counting pixels", len(self), "masks") as bar:
            for counts in tried(range(len(self)), masks.read, count):
                if isinstance(counts, SampleError):
                    raise counts
                total[: len(counts)] += counts
                bar.advance()
        names = self.classes or map(str, range(total.nonzero()[0].max(initial=-1) + 1))
        return dict(zip(names, total.tolist(), strict=False))

    def preview(self, num_images: int = 16) -> Preview:
        """Small pictures with their masks laid over: a grid in a notebook, lines elsewhere."""
        return make_preview(self.with_transform(laid_over), num_images)

    def random_patches(
        self, size: int | Sequence[int], per_image: int, *, open_pairs: int = 16
    ) -> RandomPatches:
        """A data set of `per_image` patches of each pair: see `RandomPatches`.

        `size` is (height, width), or one number for both. A batch mixes `open_pairs` pairs, which
        each rank holds in memory. A transform of this datastore is applied to the patches, after
        cutting.
        """
        height, width = size if isinstance(size, Sequence) else (size, size)
        sides = operator.index(height), operator.index(width)
        return RandomPatches(self, sides, per_image, open_pairs)


def _matched(
    folders: Sequence[Folder], files: Sequence[Sequence[FileRef]], match: Match
) -> tuple[list[FileRef], list[FileRef]]:
    """The images, and the mask of each: what `match` makes of the paths of both is the same."""
    if match != "stem" and not callable(match):
        raise OptionsError(f'match={match!r} must be "stem", or a function of a path')

    def key_of(file: FileRef) -> str:
        # The extension of the last part: dots in the names of folders stay.
        return match(file.path) if callable(match) else os.path.splitext(file.path)[0]

    times = [Counter(map(key_of, own)) for own in files]
    odd = [
        folder.name(file.path)
        for folder, own in zip(folders, files, strict=True)
        for file in own
        if any(count[key_of(file)] != 1 for count in times)
    ]
    if odd:
        raise DataError(
            f"{len(odd):,} images or masks have no partner of their own, as "
            f"{', '.join(sorted(odd)[:_SHOWN])}. Remove them, or pass match= a function; it makes "
            "of the path of an image or mask what both have in common",
            "no partner",
        )
    images, masks = files
    mask_of = {key_of(mask): mask for mask in masks}
    return list(images), [mask_of[key_of(image)] for image in images]


# ---- masks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskClasses:
    """What pixels of masks mean: of each id or colour (0xRRGGBB) the index of its class. Without
    names, they are the indices themselves."""

    names: tuple[str, ...] = ()
    meaning: tuple[tuple[int, int], ...] = ()
    are_colours: bool = False

    @classmethod
    def of(cls, classes: Mapping[str, Any] | None) -> MaskClasses:
        if classes is None:
            return cls()
        given = list(classes.values()) if isinstance(classes, Mapping) else []
        listed = [value if isinstance(value, list) else [value] for value in given]
        meaning = [(_number(one), place) for place, ones in enumerate(listed) for one in ones]
        numbers = [number for number, _ in meaning]
        kinds = {isinstance(one, tuple) for ones in listed for one in ones}
        is_odd = [] in listed or len(kinds) != 1 or -1 in numbers
        if is_odd or len(set(numbers)) < len(numbers):
            raise OptionsError(
                f"classes={classes!r} must map each name to an id in 0..65535, or each to a colour "
                "(red, green, blue) in 0..255, or to a list of several, and none to two; or be None"
            )
        return cls(tuple(classes), tuple(meaning), are_colours=kinds.pop())


@lru_cache(maxsize=4)
def _table(classes: MaskClasses) -> NDArray[np.int16]:
    """From each possible value to its class: 32 MiB for colours, once in a process."""
    table = np.full(_NUM_COLOURS if classes.are_colours else _NUM_IDS, NO_CLASS, np.int16)
    for value, place in classes.meaning:
        table[value] = place
    return table


def decode_mask(data: bytes, name: str, classes: MaskClasses) -> torch.Tensor:
    """The class of each pixel, -100 for none: int16 tensor (height, width), int32 for masks of 16
    bits as is. Raises SampleError as `open_image`."""
    import torch

    from gpupool.data.reading.decode import open_image

    with open_image(data, name, "a mask") as image:
        values = _values(image, classes)
    if classes.names:
        return torch.from_numpy(_table(classes)[values])
    # int16 holds ids of 8 bits, but not all of 16.
    return torch.from_numpy(values.astype(np.int16 if values.dtype.itemsize == 1 else np.int32))


def _values(image: Image.Image, classes: MaskClasses) -> NDArray[Any]:
    if classes.are_colours:
        red, green, blue = np.moveaxis(np.asarray(image.convert("RGB"), np.int32), -1, 0)
        joined: NDArray[np.int32] = red << 16 | green << 8 | blue
        return joined
    if len(image.getbands()) > 1 or image.mode == "F":
        raise ValueError(
            f"it has several channels, or fractions ({image.mode}); give classes= from names to "
            "colours, or store ids as a grey or palette PNG"
        )
    values = np.asarray(image)
    if values.dtype.kind == "b":  # of mode "1"
        return values.astype(np.uint8)
    # Mode "I" has 32 bits: such an id would lie outside of the table.
    if values.size and not 0 <= int(values.min()) <= int(values.max()) < _NUM_IDS:
        raise ValueError("its ids are not in 0..65535")
    return values


def _number(value: Any) -> int:
    """An id, or a colour as 0xRRGGBB; -1 for what is neither."""
    is_colour = isinstance(value, tuple) and len(value) == 3
    parts, below = (value, 256) if is_colour else ((value,), _NUM_IDS)
    # True and False are ints for Python, but nobody means them as ids.
    if not all(type(part) is int and 0 <= part < below for part in parts):
        return -1
    return int.from_bytes(value) if is_colour else int(value)


def laid_over(image: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The image with a colour for each class laid over it, and the mask; class 0 stays as it is."""
    import torch

    colour = 255 * (mask >> torch.arange(3)[:, None, None] & 1)  # red, green, yellow, blue, ...
    return torch.where(mask > 0, (image + colour) // 2, image).to(torch.uint8), mask
