"""Labelled images below a URL, one file each, as a torch map-style dataset. Runs anywhere.

Made in the notebook, where it lists the files once; travels to the engines by pickle, where it
reads them. Importing this loads no torch; reading an image does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import DataError, DataNotFoundError
from gpupool.core.options.class_names import NO_CLASS
from gpupool.core.progress import progress
from gpupool.data.datastores.base import Datastore, Sample
from gpupool.data.datastores.labels import Labels, class_names, label_files
from gpupool.data.datastores.manifest import Files, Manifest
from gpupool.data.reading.samples import Draw
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileInfo, Listing

NAMELESS = ""
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")


class ImageDatastore(Datastore[Files]):
    """The images below `url` with a label each; immutable, every method gives a new datastore.

    The files are listed here, once, sorted by path; hidden ones are left out.

        ds = ImageDatastore("s3://photos/train")
        image, label = ds[0]              # uint8 tensor (3, height, width), index into ds.classes
        train, rest = ds.split_each_label(0.9, seed=0)

    Args:
        url: any fsspec URL, or a path.
        labels: "foldernames" (the folder an image lies in); a function from an image's URL to its
            label, or to None to leave the image out; or a table: a mapping of paths to labels, or a
            data frame with the columns "path" and "label". Paths in it are those below `url`, or
            URLs, and may lack the extension; images without a row are left out. None: the images
            have no labels, as those to be predicted; `ds[i]` has -100 in its place.
        classes: the names of the classes in the order of their indices. Left out: those there are,
            sorted; labels of a table or function that are whole numbers are sorted as numbers.
        extensions: of the files to take, in any case.
        storage_options: for the file system of `url`.

    Raises DataNotFoundError, CredentialsError or DataError if listing fails, if there is no image,
    if a folder below `url` holds none, or if a table has rows without an image; OptionsError for
    what is no label.
    """

    def __init__(
        self,
        url: str,
        *,
        labels: Labels = "foldernames",
        classes: Sequence[str] | None = None,
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        folder = Folder(url, dict(storage_options or {}))
        # `labels` may be a data frame, which compares element by element and has no truth.
        by_folder = isinstance(labels, str) and labels == "foldernames"
        images = _images(folder, tuple(extensions), check_folders=by_folder)
        paths = [image.path for image in images]
        if labels is None:
            named: list[str | None] = [NAMELESS] * len(paths)
        else:
            named = label_files(paths, lambda place: folder.name(paths[place]), labels)
        # Folders are sorted as texts: so does torchvision's ImageFolder, whose networks exist.
        names = class_names(named, classes, by_number=not by_folder)
        super().__init__(_manifest(folder, images, named, names))

    @property
    def classes(self) -> list[str]:
        """The names of the labels; none without labels."""
        return [] if self._is_nameless else super().classes

    @property
    def labels(self) -> NDArray[np.int64]:
        """The label of each image as an index into `classes`, -100 without labels."""
        return np.full(len(self), NO_CLASS) if self._is_nameless else super().labels

    def decode(self, index: int, fetched: Any, draw: Draw | None = None) -> Sample:
        """The sample that `fetch(index)` has read, as of any datastore; -100 without labels."""
        made, label = super().decode(index, fetched, draw)
        return made, NO_CLASS if self._is_nameless else label

    @property
    def _is_nameless(self) -> bool:
        # A manifest has a label for each sample; here all have the one without a name.
        return self._manifest.classes == (NAMELESS,)


def list_folder(folder: Folder) -> Listing:
    """`Folder.list_files`, with a bar that counts if it takes long."""
    with progress("Listing", unit="files") as bar:
        listing = folder.list_files(bar.update)
        bar.update(len(listing.files))
    return listing


def labelled(labels: Sequence[str | None], shown_url: str) -> list[int]:
    """The places that have a label. Raises DataError if none has."""
    kept = [place for place, label in enumerate(labels) if label is not None]
    if not kept:
        raise DataError(
            f"{shown_url}: labels= gave None for all {len(labels):,} images", "no labels"
        )
    return kept


def _manifest(
    folder: Folder,
    images: Sequence[FileInfo],
    labels: Sequence[str | None],
    classes: tuple[str, ...],
) -> Manifest[Files]:
    kept = labelled(labels, folder.shown_url)
    index_of: dict[str | None, int] = {name: index for index, name in enumerate(classes)}
    # `class_names` holds every label or has raised, so no key is missing here.
    indices = np.array([index_of[labels[place]] for place in kept], np.int32)
    files = Files.of(folder, [images[place] for place in kept])
    return Manifest(files, np.arange(len(files)), indices, classes)


def _images(folder: Folder, extensions: tuple[str, ...], check_folders: bool) -> list[FileInfo]:
    listing = list_folder(folder)
    endings = tuple(extension.lower() for extension in extensions)
    images = [file for file in listing.files if file.path.lower().endswith(endings)]
    if not images:
        raise DataNotFoundError(
            f"{folder.shown_url} holds no images with extension {', '.join(extensions)}", "nothing"
        )
    if check_folders:
        _check_folders(folder, listing, images)
    return images


def _check_folders(folder: Folder, listing: Listing, images: Sequence[FileInfo]) -> None:
    """A class without an image is a mistake that training would not show."""
    # Images may lie deeper: a folder at the top counts as filled by any image below it.
    filled = {image.path.split("/")[0] for image in images if "/" in image.path}
    empty = [name for name in listing.folders if name not in filled]
    if empty:
        more = f" (nor do {len(empty) - 1} other folders)" if len(empty) > 1 else ""
        raise DataError(
            f"{folder.name(empty[0])} holds no images{more}; "
            "remove it, or pass labels= a function from an image's URL to its label",
            "empty class",
        )
