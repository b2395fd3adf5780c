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
from typing import Any, NamedTuple

import numpy as np

from gpupool.core.errors import DataError, DataNotFoundError
from gpupool.core.progress import progress
from gpupool.data.datastores.base import Datastore
from gpupool.data.datastores.images import list_folder
from gpupool.data.datastores.labels import Labels, indexed, is_by_folder, label_files
from gpupool.data.datastores.table import Files, Texts
from gpupool.data.datastores.tar_index import Member, Tar, list_members
from gpupool.data.datastores.told import IMAGE_EXTENSIONS, warn_left_out, warn_of_pictures
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileRef

# The name up to the first dot of its last part, and the rest.
_KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
# Members that belong to no sample.
_META = re.compile(r"__[^/]*__(/|$)")
_COMPRESSED = (".bz2", ".gz", ".tgz", ".xz", ".zst")


class TarDatastore(Datastore[Files]):
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
        extensions: Sequence[str] = IMAGE_EXTENSIONS,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        folder, tars = _find_tars(url, dict(storage_options or {}))
        where = labels if isinstance(labels, str) and labels.startswith(".") else ""
        member, _, field = where.partition(":")
        endings = tuple(extension.lower() for extension in extensions)
        images, names = list[_Image](), list[str]()
        with progress("Reading headers", len(tars), "tars") as bar:
            for tar, members in enumerate(list_members(folder, tars, member.lower(), bar.update)):
                images += _images(tar, Tar(folder, tars[tar]), members, endings, member.lower())
                names += [name for name, *_ in members if "/." not in f"/{name}"]
        warn_of_pictures(names, extensions)
        if not images:
            raise DataNotFoundError(
                f"the {len(tars):,} tars at {folder.shown_url} hold no images with extension "
                f"{', '.join(extensions)}",
                "nothing",
            )
        if member:
            named: list[str | None] = [_label(image, member, field) for image in images]
        else:
            paths = [image.member.name for image in images]
            named = label_files(paths, lambda place: images[place].url, labels, classes)
        kept, numbers, found = indexed(named, classes, not is_by_folder(labels), folder.shown_url)
        chosen = [images[place] for place in kept]
        rows = [
            (image.tar, tars[image.tar].version, image.member.size, image.member.start)
            for image in chosen
        ]
        items = Files(
            tuple(Tar(folder, tar) for tar in tars),
            Texts.of(image.member.name for image in chosen),
            np.array(rows, Files.ROW),
        )
        super().__init__(items, numbers, found)


class _Image(NamedTuple):
    """The image of a sample, in which tar, and the text of the member with its label, if any."""

    tar: int
    url: str
    member: Member
    text: str | None


def _find_tars(url: str, options: Mapping[str, Any]) -> tuple[Folder, list[FileRef]]:
    """The folder that was listed, and the tars in it that are meant, sorted by path."""
    place, pattern = os.fspath(url), "*.tar"
    parent, slash, last = place.rpartition("/")
    is_named = last.lower().endswith(".tar") or "*" in last
    if is_named:
        place, pattern = parent or slash or ".", last
    folder = Folder(place, options)
    # One listing has sizes and versions of all. `*` means no folders below, as in a shell.
    files = [file for file in list_folder(folder).files if not is_named or "/" not in file.path]
    tars = [
        file.ref for file in files if fnmatch(file.path if is_named else file.path.lower(), pattern)
    ]
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


def _images(
    number: int, tar: Tar, members: Sequence[Member], endings: tuple[str, ...], suffix: str
) -> Iterator[_Image]:
    """The image of each sample of one tar."""
    for key, sample in _samples(members):
        # Extensions count in any case; of two members that differ in case only the later one.
        own = {member.name.lower(): member for member in sample}
        found = [member for name, member in own.items() if name.endswith(endings)]
        if len(found) > 1:
            url = tar.name(key)
            raise DataError(
                f"the sample {url} has {len(found)} images, {found[0].name} and {found[1].name}; "
                "say which: extensions=[...]",
                "several images",
                url=url,
            )
        label = own.get(f"{key}{suffix}".lower()) if suffix else None
        for member in found:
            yield _Image(number, tar.name(member.name), member, label and label.text)


def _samples(members: Iterable[Member]) -> Iterator[tuple[str, list[Member]]]:
    """The samples of a tar: the key of each, and its members, as webdataset groups them.

    Names without a dot, and those like `__this__` or in a folder `__this__/`, belong to no sample.
    """
    keyed = (
        (match[1], member)
        for member in members
        if (match := _KEY.fullmatch(member.name)) and not _META.match(member.name)
    )
    # Only neighbours belong together: the same key further on is another sample.
    for key, found in groupby(keyed, itemgetter(0)):
        yield key, [member for _, member in found]


def _label(image: _Image, member: str, field: str) -> str:
    """The label in the member beside an image."""
    label: Any = (image.text or "").strip()
    if not label:
        raise DataError(
            f"there is no {member} beside {image.url}, or nothing in it; say where the labels are: "
            'labels=".cls", ".json:field", "foldernames", ...',
            "no member",
            url=image.url,
        )
    if not field:
        return str(label)
    try:
        label = json.loads(label)[field]
        # A bool is an int for Python, but nobody means a class "True".
        if isinstance(label, bool) or not isinstance(label, (str, int)):
            raise TypeError(f"a label must be a text or an integer, not {reprlib.repr(label)}")
        return str(label)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"the {member} beside {image.url} has no field {field!r} that is a label "
            f"({type(error).__name__}: {error})",
            "no field",
            url=image.url,
        ) from None
