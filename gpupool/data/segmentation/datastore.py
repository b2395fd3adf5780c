"""Images with a class for each pixel, for semantic segmentation. Runs anywhere; no torch at import.

Made in the notebook, where it lists the files once; travels to the engines by pickle, where it
reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from gpupool.core.errors import DataNotFoundError, OptionsError, SampleError
from gpupool.core.progress import OnProgress
from gpupool.data.datastores import splits
from gpupool.data.datastores.base import Datastore, Sample
from gpupool.data.datastores.preview import Preview, make_preview
from gpupool.data.datastores.table import Files
from gpupool.data.datastores.told import IMAGE_EXTENSIONS, warn_of_pictures
from gpupool.data.reading.samples import Draw
from gpupool.data.segmentation.masks import MaskClasses, decode_mask
from gpupool.data.segmentation.pairs import FilePairs, Match, matched
from gpupool.data.segmentation.patches import RandomPatches
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileInfo

if TYPE_CHECKING:
    import torch

MASK_EXTENSIONS = (".png", ".tif", ".tiff", ".bmp", ".webp")


class SegmentationDatastore(Datastore[FilePairs]):
    """Images and their masks; immutable, every method gives a new datastore.

        ds = SegmentationDatastore("s3://streets/images", "s3://streets/masks",
                                   classes={"road": 7, "car": [26, 27]})
        image, mask = ds[0]      # uint8 (3, height, width); int64 (height, width), class or -100
        patches = ds.random_patches(512, per_image=16)

    Pixels of no class are -100, which torch's cross_entropy leaves out.

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
        self._mask_classes = MaskClasses.of(classes)
        options = dict(storage_options or {})
        image_folder, mask_folder = Folder(images_url, options), Folder(masks_url, options)
        images, masks = matched(
            _files(image_folder, image_extensions, "images"),
            _files(mask_folder, mask_extensions, "masks"),
            match,
            image_folder.name,
            mask_folder.name,
        )
        pairs = FilePairs(Files.of(image_folder, images), Files.of(mask_folder, masks))
        # Each sample has a label; here all have the one without a name.
        super().__init__(pairs, np.zeros(len(pairs), np.int32), ("",))

    @property
    def classes(self) -> list[str]:
        """The names of the classes of pixels, by index; none where masks hold the indices."""
        return list(self._mask_classes.names)

    @property
    def mask_paths(self) -> list[str]:
        """The URL of each mask."""
        return [self.items.masks.url(row) for row in range(len(self))]

    def __repr__(self) -> str:
        classes = f"{len(self.classes)} classes, " if self.classes else ""
        return f"{type(self).__name__}({len(self):,} pairs, {classes}{self.url})"

    def pixels(self, index: int, fetched: tuple[bytes, bytes]) -> tuple[torch.Tensor, torch.Tensor]:
        """Image (3, height, width) uint8 and mask (height, width) int16, of what was fetched.

        Raises SampleError if one is damaged, or if they differ in size.
        """
        from gpupool.data.reading.decode import decode

        masks, row = self.items.masks, self._row(index)
        image = decode(fetched[0], self.name(index))
        mask = decode_mask(fetched[1], masks.url(row), self._mask_classes)
        if image.shape[1:] != mask.shape:
            have, has = (" x ".join(map(str, size)) for size in (image.shape[1:], mask.shape))
            raise SampleError(
                f"{masks.url(row)} has {has} pixels, its image {self.name(index)} has {have}; "
                "store them in one size",
                masks.url(row),
            )
        return image, mask

    def decode(self, index: int, fetched: Any, draw: Draw | None = None) -> Sample:
        """Image and mask that `fetch(index)` has read; computes, in several threads at once.

        `draw` keys the random numbers of the transform. Raises SampleError naming the file that is
        damaged, and what the transform raises.
        """
        from gpupool.data.datastores.joint_transforms import transformed
        from gpupool.data.reading.augmentation import keyed_draws

        image, mask = self.pixels(index, fetched)
        with keyed_draws(draw, index):
            # int16 takes a quarter of the memory up to here; torch's losses want int64.
            return transformed(self._transform, self.name(index), image, mask.long())

    def with_transform(self, transform: Callable[..., Any] | None) -> Self:
        """The same pairs, each passed through `transform(image, mask)`; None: as they are.

        It gets torchvision's tv_tensors.Image and Mask, so one transform of
        torchvision.transforms.v2 changes both alike. Where it fills, masks need
        `fill={tv_tensors.Image: 0, tv_tensors.Mask: -100}` for pixels of no class.
        """
        return super().with_transform(transform)

    def split(self, *sizes: float, seed: int | None = None) -> tuple[Self, ...]:
        """A part for each of `sizes` (fractions, or numbers of pairs), and one for the rest if any.

        `seed=None` takes the first pairs, a number draws them.
        """
        parts = splits.split(self.labels, [""], sizes, seed)
        return tuple(self.subset(part) for part in parts)

    def split_each_label(self, *sizes: float, seed: int | None = None) -> tuple[Self, ...]:
        """Not of pairs, which have a class for each pixel: see `split`. Raises OptionsError."""
        raise OptionsError("pairs of image and mask have no label each; use split(0.9, seed=0)")

    def concat(self, *others: Self) -> Self:
        """The pairs of this and others with the same classes, one after the other."""
        for other in others:
            # The same index would mean another class.
            if getattr(other, "_mask_classes", None) != self._mask_classes:
                raise OptionsError("concat takes datastores with the same classes=")
        return super().concat(*others)

    def with_classes(self, classes: Sequence[str]) -> Self:
        """The same pairs, with the indices that their classes have among `classes`.

        Raises OptionsError if these lack a class, or where masks hold the indices.
        """
        return self._with(_mask_classes=self._mask_classes.among(classes))

    def count_each_label(self, on_progress: OnProgress | None = None) -> dict[str, int]:
        """How many pixels each class has, in the order of `classes`; reads every mask once.

        Where masks hold indices, their names are "0", "1", ... up to the largest there is. Pixels
        of no class are not counted. `on_progress(done, total)` is called now and then.
        """
        from gpupool.data.segmentation.pixel_counts import count_pixels

        counts = count_pixels(self.items.masks, self._mask_classes, on_progress)
        names = self.classes or [str(index) for index in range(len(counts))]
        # Classes that no pixel has are counted too, as 0.
        counts = np.append(counts, np.zeros(max(0, len(names) - len(counts)), np.int64))
        return dict(zip(names, counts.tolist(), strict=True))

    def preview(self, num_images: int = 16, seed: int | None = None) -> Preview:
        """Small pictures with their masks laid over: a grid in a notebook, lines elsewhere."""
        from gpupool.data.datastores.joint_transforms import laid_over

        return make_preview(self.with_transform(laid_over), num_images, seed)

    def random_patches(
        self,
        size: int | Sequence[int],
        per_image: int,
        *,
        seed: int = 0,
        open_pairs: int = 16,
    ) -> RandomPatches:
        """A data set of `per_image` patches of each pair: see `RandomPatches`.

        `size` is (height, width), or one number for both. A batch mixes `open_pairs` pairs, which
        each rank holds in memory. A transform of this datastore is applied to the patches, after
        cutting.
        """
        height, width = _height_and_width(size)
        # Cut first: a transform of the whole picture would compute what no patch shows.
        whole = self.with_transform(None)
        return RandomPatches(whole, (height, width), per_image, seed, open_pairs, self._transform)


def _height_and_width(size: object) -> tuple[int, int]:
    sides: list[Any] = list(size) if isinstance(size, Sequence) else [size, size]
    if len(sides) != 2 or not all(isinstance(side, Integral) for side in sides):
        raise OptionsError(f"size={size!r} must be a number of pixels, or (height, width)")
    return int(sides[0]), int(sides[1])


def _files(folder: Folder, extensions: Sequence[str], what: str) -> list[FileInfo]:
    endings = tuple(extension.lower() for extension in extensions)
    listed = folder.list_files().files
    warn_of_pictures((file.path for file in listed), extensions)
    files = [file for file in listed if file.path.lower().endswith(endings)]
    if not files:
        raise DataNotFoundError(
            f"{folder.shown_url} holds no {what} with extension {', '.join(extensions)}", "nothing"
        )
    return files
