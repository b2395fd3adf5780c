"""Labelled images in tar files, laid out as WebDataset does. Runs anywhere; no torch at import.

Neighbours in a tar whose names are the same up to the first dot of the last part are one sample:

    train-000.tar:  cat01.jpg  cat01.cls  dog07.jpg  dog07.cls  ...
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from itertools import groupby
from operator import itemgetter
from typing import Any

from gpupool.core.errors import DataError, DataNotFoundError
from gpupool.core.progress import progress
from gpupool.data.datastores.base import Datastore
from gpupool.data.datastores.images import list_folder
from gpupool.data.datastores.labels import Labels, labelled
from gpupool.data.datastores.table import Files
from gpupool.data.datastores.tar_index import Member, Tar, list_members
from gpupool.data.datastores.told import IMAGE_EXTENSIONS, warn_left_out, warn_of_pictures
from gpupool.data.stores.folder import Folder

# The name up to the first dot of its last part, and the rest.
_KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
# Members that belong to no sample.
_META = re.compile(r"__[^/]*__(/|$)")
_COMPRESSED = (".bz2", ".gz", ".tgz", ".xz", ".zst")


class TarDatastore(Datastore):
    """The images in the tars at `url`, one label each; does all that an `ImageDatastore` does.

    The headers of the tars are read here, once, and kept in `~/.cache/gpupool` (XDG_CACHE_HOME)
    for tars that have an ETag; an image is then read by its range, so counts are exact, and any
    order, split and number of ranks is possible. Samples without an image are left out.

        ds = TarDatastore("s3://photos/train-*.tar")

    Args:
        url: a folder whose .tar files at any depth are meant, a tar, or several: a last part with
            `*`. Any fsspec URL.
        labels: ".cls": the text of the sample's member of that name; ".json:field": a field of it;
            "foldernames", a function or a table as of `ImageDatastore`, where an image's path is
            its name in the tar, and its URL that of the tar with the name behind it.
        classes, storage_options: as of `ImageDatastore`.
        extensions: of the members to take; one image in each sample.

    Raises DataNotFoundError, CredentialsError or DataError if there is no tar or no image, a tar is
    damaged, or a sample has no label; OptionsError for what is no label.
    """

    def __init__(
        self,
        url: str,
        *,
        labels: Labels = ".cls",
        classes: Sequence[str] | None = None,
        extensions: str | Sequence[str] = IMAGE_EXTENSIONS,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        folder, tars = _find_tars(url, dict(storage_options or {}))
        where = labels if isinstance(labels, str) and labels.startswith(".") else ""
        suffix, _, field = where.partition(":")
        extensions = [extensions] if isinstance(extensions, str) else extensions
        endings = tuple(extension.lower() for extension in extensions)
        rows, paths, named, seen = list[tuple[int, ...]](), list[str](), list[str](), list[str]()
        with progress("Reading headers", len(tars), "tars") as bar:
            for number, members in enumerate(list_members(tars, suffix.lower())):
                tar = tars[number]
                for image, label in _samples(tar, members, endings, suffix, field):
                    rows.append((number, tar.file.version, image.size, image.start))
                    paths.append(image.name)
                    named.append(label)
                seen += [member.name for member in members if "/." not in f"/{member.name}"]
                bar.advance()
        warn_of_pictures(seen, extensions)
        if not rows:
            raise DataNotFoundError(
                f"the {len(tars):,} tars at {folder.shown_url} hold no images with extension "
                f"{', '.join(extensions)}",
                "nothing",
            )
        files = Files.of(tars, paths, rows)
        given = iter(named)
        labels = (lambda url: next(given)) if suffix else labels
        kept, indices, names = labelled(paths, files.url, labels, classes)
        super().__init__((files.take(kept),), indices, names)


def _find_tars(url: str, options: Mapping[str, Any]) -> tuple[Folder, list[Tar]]:
    """The folder that was listed, and the tars in it that are meant, sorted by path."""
    place, pattern = os.fspath(url), "*.tar"
    parent, slash, last = place.rpartition("/")
    is_named = last.lower().endswith(".tar") or "*" in last
    if is_named:
        place, pattern = parent or slash or ".", last
    folder = Folder(place, options)
    # One listing has sizes and versions of all. `*` means no folders below, as in a shell.
    files = [file for file in list_folder(folder).files if not is_named or "/" not in file.path]
    chosen = (file for file in files if fnmatch(file.path.lower(), pattern.lower()))
    tars = [Tar(folder, file.ref) for file in chosen]
    if not tars:
        raise DataNotFoundError(
            f"{folder.shown_url} holds no {pattern}; compressed ones must be unpacked first, and "
            "several are named by `*`",
            "nothing",
        )
    if not is_named:
        paths = (file.path for file in files)
        warn_left_out(paths, _COMPRESSED, "only .tar can be read by parts")
    return folder, tars


def _samples(
    tar: Tar, members: Iterable[Member], endings: tuple[str, ...], suffix: str, field: str
) -> Iterator[tuple[Member, str]]:
    """The image of each sample of a tar that has one, and its label, "" without a suffix.

    They are grouped as webdataset does: names without a dot, and those like `__this__` or in a
    folder `__this__/`, belong to no sample. Of two names that differ in case the later one counts.
    """
    keyed = (
        (match[1], member)
        for member in members
        if (match := _KEY.fullmatch(member.name)) and not _META.match(member.name)
    )
    # Only neighbours belong together: the same key further on is another sample.
    for key, found in groupby(keyed, itemgetter(0)):
        sample = {member.name.lower(): member for _, member in found}
        images = [member for name, member in sample.items() if name.endswith(endings)]
        if len(images) > 1:
            url = tar.name(key)
            raise DataError(
                f"the sample {url} has {len(images)} images, {images[0].name} and "
                f"{images[1].name}; say which: extensions=[...]",
                "several images",
                url=url,
            )
        for image in images:
            yield image, _label(tar, key, sample, suffix, field) if suffix else ""


def _label(tar: Tar, key: str, sample: Mapping[str, Member], suffix: str, field: str) -> str:
    """The label of a sample, in its member with that suffix."""
    member = sample.get(f"{key}{suffix}".lower())
    try:
        text = member.text if member else ""
        label = json.loads(text)[field] if field else text.strip()
        # A bool is an int for Python, but nobody means a class "True".
        if isinstance(label, bool) or not isinstance(label, (str, int)) or label == "":
            raise TypeError(f"{reprlib.repr(label)} is no label")
        return str(label)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        url = tar.name(f"{key}{suffix}")
        raise DataError(
            f"{url} is missing, or holds no label ({type(error).__name__}: {error}); say where the "
            'labels are: labels=".cls", ".json:field", "foldernames", ...',
            "no label",
            url=url,
        ) from None
