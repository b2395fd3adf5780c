"""Labelled images below a URL, as a torch map-style dataset. Runs anywhere.

Made in the notebook, where it lists the files once; travels to the engines by pickle, where it
reads them. Importing this loads no torch; reading an image does.
"""

from __future__ import annotations

import copy
import operator
import posixpath
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpupool.core.errors import DataError, DataNotFoundError, OptionsError
from gpupool.data.fetch import FileInfo, Folder, Listing
from gpupool.data.shards import Indices, epoch_order, keyed_generator

if TYPE_CHECKING:
    import torch

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
Labels = Literal["foldernames"] | Callable[[str], str | None]
Sample = tuple[Any, int]


class ImageDatastore:
    """The images below `url` with a label each; immutable, every method gives a new datastore.

    `url` is any fsspec URL or a path; `storage_options` go to its file system. `labels` is
    "foldernames" (the folder an image lies in) or a function from an image's URL to its label, or
    to None to leave the image out. Hidden files and files with other extensions are left out.

    The files are listed here, once, sorted by path. Raises DataNotFoundError, CredentialsError or
    DataError if that fails, if there is no image, or if a folder below `url` holds none.

        ds = ImageDatastore("s3://photos/train")
        image, label = ds[0]              # uint8 tensor (3, height, width), index into ds.classes
        train, rest = ds.split_each_label(0.9, seed=0)
    """

    def __init__(
        self,
        url: str,
        *,
        labels: Labels = "foldernames",
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if labels != "foldernames" and not callable(labels):
            raise OptionsError(f'labels={labels!r} must be "foldernames" or a function of the URL')
        self._folder = Folder(url, dict(storage_options or {}))
        images = _images(self._folder, tuple(extensions), check_folders=not callable(labels))
        label_of = _labelled(self._folder, images, labels)
        self._classes = sorted(set(label_of.values()))
        index_of = {label: index for index, label in enumerate(self._classes)}
        # One buffer of bytes instead of a million objects: small, and quick to pickle.
        self._files = np.array([path.encode() for path in label_of])
        self._labels = np.array([index_of[label] for label in label_of.values()], dtype=np.int64)
        self._transform: Callable[[torch.Tensor], Any] | None = None

    @property
    def url(self) -> str:
        """Where the images lie, without a password."""
        return self._folder.shown_url

    @property
    def classes(self) -> list[str]:
        """The names of the labels, sorted. Parts of a datastore keep all names of the whole."""
        return list(self._classes)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image as an index into `classes`; shape (len(self),)."""
        return self._labels.copy()

    @property
    def paths(self) -> list[str]:
        """The URL of each image."""
        return [self._folder.name(path) for path in self._decoded_paths(slice(None))]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Sample:
        """One sample: (uint8 RGB tensor (3, height, width) or what the transform made, label).

        Raises IndexError beyond the end, DataError naming the image if it cannot be read.
        """
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """The samples of a batch: read at the same time, decoded in threads; in order.

        torch's DataLoader calls this for each batch.
        """
        from gpupool.data.decode import decode_many

        chosen = np.asarray(indices, dtype=np.int64)
        paths = self._decoded_paths(chosen)
        names = [self._folder.name(path) for path in paths]
        images = decode_many(self._folder.read_many(paths), names, self._transform)
        return list(zip(images, self._labels[chosen].tolist(), strict=True))

    def __repr__(self) -> str:
        classes = f"{len(self._classes)} class{'es' if len(self._classes) != 1 else ''}"
        return f"ImageDatastore({len(self):,} images, {classes}, {self.url})"

    def count_each_label(self) -> dict[str, int]:
        """How many images each class has, in the order of `classes`."""
        counts = np.bincount(self._labels, minlength=len(self._classes))
        return dict(zip(self._classes, counts.tolist(), strict=True))

    def subset(self, indices: ArrayLike) -> Self:
        """The images at `indices` (integers, or one bool per image), in that order."""
        chosen = np.asarray(indices)
        if chosen.size == 0:
            chosen = chosen.astype(np.int64)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iub":
            raise OptionsError("indices must be a flat list of integers, or one bool per image")
        part = copy.copy(self)
        part._files = self._files[chosen]
        part._labels = self._labels[chosen]
        return part

    def shuffle(self, seed: int = 0) -> Self:
        """The same images in an order that `seed` determines."""
        return self.subset(epoch_order(len(self), seed, 0, shuffle=True))

    def partition(self, num_parts: int, index: int) -> Self:
        """Part `index` of `num_parts`: every num_parts-th image, so that the classes stay mixed."""
        if not 0 <= index < num_parts:
            raise OptionsError(
                f"index={index} must be in 0..num_parts-1, with num_parts={num_parts}"
            )
        return self.subset(np.arange(index, len(self), num_parts))

    def split_each_label(self, *sizes: float, seed: int | None = None) -> tuple[Self, ...]:
        """Split every class alike: a part for each of `sizes`, and one for the rest if any is left.

        `sizes` are fractions of each class, or whole numbers of images per class. `seed=None`
        takes the first images of each class, a number draws them.

            train, validation = ds.split_each_label(0.9, seed=0)
            few, some, rest = ds.split_each_label(10, 100)
        """
        _check_sizes(sizes)
        members = [np.flatnonzero(self._labels == index) for index in range(len(self._classes))]
        if seed is not None:
            members = [keyed_generator(seed, i).permutation(own) for i, own in enumerate(members)]
        parts: list[list[Indices]] = [[] for _ in range(len(sizes) + 1)]
        for label, own in zip(self._classes, members, strict=True):
            pieces = np.split(own, _cuts(sizes, len(own), label))
            for part, piece in zip(parts, pieces, strict=True):
                part.append(piece)
        chosen = [np.sort(np.concatenate(part)) for part in parts]
        if len(chosen[-1]) == 0:
            chosen.pop()
        if len(chosen) < 2 or any(len(part) == 0 for part in chosen):
            shown = ", ".join(map(str, sizes))
            raise OptionsError(f"split_each_label({shown}) of {self!r} leaves a part empty")
        return tuple(self.subset(part) for part in chosen)

    def with_transform(self, transform: Callable[[torch.Tensor], Any] | None) -> Self:
        """The same images, each passed through `transform`, replacing an earlier one; None: as is.

        It gets a uint8 RGB tensor (3, height, width), on an engine, from several threads at once.
        """
        if transform is not None and not callable(transform):
            raise OptionsError(f"transform={transform!r} must be a function of one image, or None")
        changed = copy.copy(self)
        changed._transform = transform
        return changed

    def _decoded_paths(self, chosen: slice | Indices) -> list[str]:
        return [path.decode() for path in self._files[chosen].tolist()]


def _images(folder: Folder, extensions: tuple[str, ...], check_folders: bool) -> list[FileInfo]:
    listing = folder.list_files()
    endings = tuple(extension.lower() for extension in extensions)
    images = [file for file in listing.files if file.path.lower().endswith(endings)]
    if not images:
        raise DataNotFoundError(
            f"{folder.shown_url} holds no images with extension {', '.join(extensions)}"
        )
    if check_folders:
        _check_folders(folder, listing, images)
    return images


def _check_folders(folder: Folder, listing: Listing, images: Sequence[FileInfo]) -> None:
    """A class without an image is a mistake that training would not show."""
    filled = {image.path.split("/")[0] for image in images if "/" in image.path}
    empty = [name for name in listing.folders if name not in filled]
    if empty:
        more = f" (nor do {len(empty) - 1} other folders)" if len(empty) > 1 else ""
        raise DataError(
            f"{folder.name(empty[0])} holds no images{more}; "
            "remove it, or pass labels= a function from an image's URL to its label"
        )


def _labelled(folder: Folder, images: Sequence[FileInfo], labels: Labels) -> dict[str, str]:
    """Path to label, in the order of `images`."""
    named: dict[str, str] = {}
    for image in images:
        url = folder.name(image.path)
        label = labels(url) if callable(labels) else posixpath.basename(posixpath.dirname(url))
        if isinstance(label, str):
            named[image.path] = label
        elif label is not None:
            raise OptionsError(f"labels= gave {label!r} for {url}; it must give a str, or None")
    if not named:
        raise DataError(f"{folder.shown_url}: labels= gave None for all {len(images)} images")
    return named


def _check_sizes(sizes: Sequence[float]) -> None:
    counts = [isinstance(size, Integral) and not isinstance(size, bool) for size in sizes]
    if sizes and all(counts) and min(sizes) >= 1:
        return
    if sizes and not any(counts) and all(0 < size < 1 for size in sizes) and sum(sizes) < 1 + 1e-9:
        return
    shown = ", ".join(map(repr, sizes))
    raise OptionsError(
        f"split_each_label({shown}): give fractions between 0 and 1 that add up to at most 1, "
        "or whole numbers of images per label"
    )


def _cuts(sizes: Sequence[float], num_images: int, label: str) -> list[int]:
    """Where to cut the images of one class."""
    if all(isinstance(size, Integral) for size in sizes):
        if sum(sizes) > num_images:
            raise OptionsError(
                f"split_each_label asks for {sum(sizes)} images per label, "
                f"but {label!r} has {num_images}"
            )
        return [int(cut) for cut in np.cumsum(sizes)]
    # The small term makes 0.1 + 0.2 of 10 images three of them, whatever floats add up to.
    return [min(num_images, int(cut * num_images + 0.5 + 1e-9)) for cut in np.cumsum(sizes)]
