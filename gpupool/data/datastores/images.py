"""Labelled images below a URL, one file each, as a torch map-style dataset. Runs anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from os.path import splitext
from typing import Any

from gpupool.core.errors import DataNotFoundError
from gpupool.data.datastores.base import Datastore, Files
from gpupool.data.datastores.labels import Labels, warn
from gpupool.data.stores.folder import FileRef, Folder

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
# Pictures by their names, which may be of formats that no library here decodes.
OTHER_EXTENSIONS = {
    *(".apng", ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jxl"),
    *(".arw", ".cr2", ".dng", ".nef", ".pgm", ".pnm", ".ppm", ".tif", ".tiff"),
}


class ImageDatastore(Datastore):
    """The images below `url` with a label each; immutable, every method gives a new datastore.

    The files are listed here, once, sorted by path; hidden ones are left out.

        ds = ImageDatastore("s3://photos/train")
        image, label = ds[0]              # uint8 tensor (3, height, width), index into ds.classes
        train, rest = ds.split_each_label(0.9, seed=0)

    Args:
        url: any fsspec URL, or a path.
        labels: "foldernames" (the folder an image lies in); or a function from an image's URL to
            its label, or to None to leave the image out, as `table.get`. None: the images have no
            labels, as those to be predicted; `ds[i]` has -100 in its place. Classes are sorted;
            whole numbers that a function gives as numbers.
        extensions: of the files to take, in any case: one, or several.
        storage_options: for the file system of `url`.

    Warns of pictures with other extensions, which are left out, and of folders that can be read in
    several ways ("cat/monday/1.jpg"), unless `extensions` or a function say what is meant.

    Raises DataNotFoundError, CredentialsError or DataError if listing fails, or if there is no
    image; OptionsError for what is no label.
    """

    def __init__(
        self,
        url: str,
        *,
        labels: Labels = "foldernames",
        extensions: str | Sequence[str] = IMAGE_EXTENSIONS,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        folder = Folder(url, dict(storage_options or {}))
        self._fill(table(folder, find_files(folder, extensions, "images")), labels)


def find_files(folder: Folder, extensions: str | Sequence[str], what: str) -> list[FileRef]:
    """The files below a folder that are `what`, by their extensions in any case."""
    found = folder.list_files()
    extensions = [extensions] if isinstance(extensions, str) else extensions
    warn_of_pictures((file.path for file in found), extensions)
    endings = tuple(extension.lower() for extension in extensions)
    files = [file for file in found if file.path.lower().endswith(endings)]
    if not files:
        raise DataNotFoundError(
            f"{folder.shown_url} holds no {what} with extension {', '.join(extensions)}", "nothing"
        )
    return files


def table(folder: Folder, found: Sequence[FileRef]) -> Files:
    return Files.of((folder,), [(0, one.version, one.size, 0, one.path) for one in found])


def warn_of_pictures(paths: Iterable[str], extensions: Sequence[str]) -> None:
    """Say how many pictures `extensions` leave out; who chooses them knows what is left out."""
    if tuple(extensions) == IMAGE_EXTENSIONS:
        advice = 'take them too with extensions=(".jpg", ...), or convert them'
        warn_left_out(paths, OTHER_EXTENSIONS, advice)


def warn_left_out(paths: Iterable[str], endings: Set[str], advice: str) -> None:
    """Say how many of `paths`, which nobody takes, look by their endings as if they were meant."""
    found = Counter(splitext(path)[1].lower() for path in paths)
    if others := {ending: found[ending] for ending in sorted(endings & set(found))}:
        shown = ", ".join(f"{ending} {number:,}" for ending, number in others.items())
        warn(f"files are left out: {sum(others.values()):,} ({shown}); {advice}")
