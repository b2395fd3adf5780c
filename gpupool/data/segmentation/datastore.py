"""Images with a class for each pixel, for semantic segmentation. Runs anywhere; no torch at import.

Made in the notebook, where it lists the files once; travels to the engines by pickle, where it
reads them.
"""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from gpupool.core.errors import DataError, OptionsError, SampleError
from gpupool.core.options.datasets import NO_CLASS
from gpupool.core.progress import progress
from gpupool.data.datastores.base import Datastore, Sample
from gpupool.data.datastores.images import IMAGE_EXTENSIONS, find_files, table
from gpupool.data.datastores.views import Preview, make_preview
from gpupool.data.reading.samples import Draw, tried
from gpupool.data.segmentation.masks import (
    NUM_IDS,
    MaskClasses,
    decode_mask,
    laid_over,
    transformed,
)
from gpupool.data.segmentation.patches import RandomPatches
from gpupool.data.stores.folder import FileRef, Folder

if TYPE_CHECKING:
    import torch

MASK_EXTENSIONS = (".png", ".tif", ".tiff", ".bmp", ".webp")
_SHOWN = 3
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
        image_extensions: of the images to take, in any case.
        mask_extensions: of the masks to take, in any case.
        storage_options: for the file systems of both.

    Raises DataNotFoundError, CredentialsError or DataError if listing fails, if there is no image
    or no mask, or if any has no partner; OptionsError for what are no classes.
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
        """The bytes of image and mask. Waits; may be called from many threads.

        Raises SampleError, CredentialsError or DataError.
        """
        row = self._row(index)
        return tuple(files.read(row) for files in self.files)

    def pixels(self, index: int, fetched: tuple[bytes, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Image (3, height, width) uint8 and mask (height, width) int16, of what was fetched.

        Raises SampleError if one is damaged, or if they differ in size.
        """
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
        """Image and mask that `fetch(index)` has read; computes, in several threads at once.

        `draw` keys the random numbers of the transform. Raises SampleError naming the file that is
        damaged, and what the transform raises.
        """
        from gpupool.data.reading.augmentation import keyed_draws

        image, mask = self.pixels(index, fetched)
        with keyed_draws(draw, index):
            # int16 takes a quarter of the memory up to here; torch's losses want int64.
            return transformed(self.transform, self.name(index), image, mask.long())

    def with_classes(self, classes: Sequence[str]) -> Self:
        """The same pairs, with the indices that their classes have among `classes`.

        Raises OptionsError if these lack a class, or where masks hold the indices.
        """
        return self._with(mask_classes=self.mask_classes.among(classes))

    def count_each_label(self) -> dict[str, int]:
        """How many pixels each class has, in the order of `classes`; reads every mask once.

        Where masks hold indices, their names are "0", "1", ... up to the largest there is. Pixels
        of no class are not counted.
        """
        masks, total = self.files[1], np.zeros(NUM_IDS, np.int64)

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
    """The images, and the mask of each: what `match` makes of the paths of both is the same.

    Raises DataError naming files that have no partner, or share one.
    """
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
