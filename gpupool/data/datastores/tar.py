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
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from gpupool.core.errors import DataError, DataNotFoundError, OptionsError
from gpupool.core.progress import progress
from gpupool.core.terminal import without_controls
from gpupool.data.datastores.base import Datastore
from gpupool.data.datastores.compact_arrays import Texts
from gpupool.data.datastores.images import IMAGE_EXTENSIONS, list_folder, note_left_out
from gpupool.data.datastores.labels import Labels, indexed, is_by_folder, label_files
from gpupool.data.datastores.manifest import Files, Manifest
from gpupool.data.datastores.tar_index import TarIndex, index_tars
from gpupool.data.datastores.tar_members import Members
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileInfo

# The name up to the first dot of its last part, and the rest.
_KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
# Members that belong to no sample.
_META = re.compile(r"__[^/]*__(/|$)")
_BRACES = re.compile(r"(.*?)\{(\d+)\.\.(\d+)\}(.*)")


class TarDatastore(Datastore[Members]):
    """The images in the tars at `url`, one label each; does all that an `ImageDatastore` does.

    The headers of the tars are read here, once, and kept in `~/.cache/gpupool` (XDG_CACHE_HOME)
    for tars that have an ETag; an image is then read by its range, so counts are exact, and any
    order, split and number of ranks is possible. Samples without an image are left out.

        ds = TarDatastore("s3://photos/train-{000..099}.tar")

    Args:
        url: a folder whose .tar files at any depth are meant, a tar, or several: a last part with
            `*`, or with `{000..099}`, all of which must be there. Any fsspec URL.
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
        member, field = _member_and_field(labels)
        images = _index(folder, tars, tuple(extensions), member)
        if member:
            named: Sequence[str | None] = [_label(image, member, field) for image in images]
        else:
            named = label_files(
                [image.name for image in images],
                lambda place: images[place].url,
                labels,
                classes,
            )
        kept, indices, names = indexed(named, classes, not is_by_folder(labels), folder.shown_url)
        members = _members(folder, tars, [images[place] for place in kept])
        super().__init__(Manifest(members, np.arange(len(members)), indices, names))


class _Image(NamedTuple):
    """The image of a sample: which tar, where in it, and the text of the member with its label.

    `others` are the suffixes of the sample's members; `text` is None where it has no such member.
    """

    name: str
    url: str
    tar: int
    start: int
    size: int
    text: str | None
    others: tuple[str, ...]


def _find_tars(url: str, options: Mapping[str, Any]) -> tuple[Folder, list[FileInfo]]:
    """The folder that was listed, and the tars in it that are meant, sorted by path."""
    parent, _, last = os.fspath(url).rpartition("/")
    if not last.lower().endswith(".tar") and "*" not in last:
        folder = Folder(url, options)
        tars = [file for file in list_folder(folder).files if file.path.lower().endswith(".tar")]
        return folder, _required(tars, f"{folder.shown_url} holds no .tar files")
    folder = Folder(parent or ("/" if url.startswith("/") else "."), options)
    # One listing has sizes and versions of all; asking for each tar would take a request each.
    files = list_folder(folder).files
    names = _expand(last)
    if "*" in last or len(names) < 2:
        # `*` means no folders below, as in a shell.
        here = [file for file in files if "/" not in file.path]
        tars = [file for file in here if any(fnmatchcase(file.path, name) for name in names)]
        return folder, _required(tars, f"{folder.shown_url} holds no {last}")
    there = {file.path: file for file in files}
    missing = [name for name in names if name not in there]
    if missing:
        raise DataNotFoundError(
            f"{folder.name(missing[0])} does not exist ({len(missing):,} of the {len(names):,} "
            f"tars that {last} names are missing)",
            "missing",
        )
    return folder, [there[name] for name in sorted(names)]


def _required(tars: list[FileInfo], otherwise: str) -> list[FileInfo]:
    if not tars:
        raise DataNotFoundError(f"{otherwise}; compressed ones must be unpacked first", "nothing")
    return tars


def _expand(name: str) -> list[str]:
    """
    >>> _expand("a-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    """
    match = _BRACES.fullmatch(name)
    if match is None:
        return [name]
    before, first, last, after = match.groups()
    # The width of the first number decides about zeros, as in a shell: {000..099}.
    numbers = range(int(first), int(last) + 1)
    return [f"{before}{n:0{len(first)}}{rest}" for n in numbers for rest in _expand(after)]


def _member_and_field(labels: Labels) -> tuple[str, str]:
    """ ".json:field" in its two parts; two empty ones for labels that are in no member."""
    if not isinstance(labels, str) or not labels.startswith("."):
        return "", ""
    member, _, field = labels.partition(":")
    # Exactly one of both is a mistake: .json needs a field, and only .json has fields.
    if (member.lower() == ".json") != bool(field):
        raise OptionsError(f'labels={labels!r} must be ".cls" or the like, or ".json:field"')
    return member.lower(), field


def _index(
    folder: Folder, tars: Sequence[FileInfo], extensions: tuple[str, ...], member: str
) -> list[_Image]:
    with progress("Reading headers", len(tars), "tars") as bar:
        indices = index_tars(folder, [tar.ref for tar in tars], member, bar.update)
    endings = tuple(extension.lower() for extension in extensions)
    images = [
        image
        for number, (tar, index) in enumerate(zip(tars, indices, strict=True))
        for image in _images(folder.name(tar.path), number, index, endings, member)
    ]
    if not images:
        raise DataNotFoundError(
            f"the {len(tars):,} tars at {folder.shown_url} hold no images with extension "
            f"{', '.join(extensions)}",
            "nothing",
        )
    names = [
        f"{tar.path}/{name}"
        for tar, index in zip(tars, indices, strict=True)
        for name in index.names
    ]
    note_left_out(names, [f"{tars[image.tar].path}/{image.name}" for image in images], extensions)
    return images


def _images(
    url: str, tar: int, index: TarIndex, endings: tuple[str, ...], member: str
) -> Iterator[_Image]:
    """The image of each sample of one tar."""
    for key, rows in group(index.names):
        # Extensions count in any case.
        # Of two members that differ in case only the later one counts.
        names = {index.names[row].lower(): row for row in rows}
        found = [row for name, row in names.items() if name.endswith(endings)]
        if len(found) > 1:
            raise DataError(
                f"{url}: the sample {key} has {len(found)} images, {index.names[found[0]]} and "
                f"{index.names[found[1]]}; say which: extensions=[...]",
                "several images",
                url=url,
            )
        text = names.get(f"{key}{member}".lower()) if member else None
        for row in found:
            name = index.names[row]
            yield _Image(
                name=name,
                url=without_controls(f"{url}/{name}"),
                tar=tar,
                start=int(index.starts[row]),
                size=int(index.sizes[row]),
                text=None if text is None else index.texts[text],
                others=tuple(other[len(key) :] for other in names),
            )


def group(names: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
    """The samples of a tar: the key of each, and the places of its members, as webdataset does.

    Names without a dot, and those like `__this__` or in a folder `__this__/`, belong to no sample.

    >>> list(group(["a/1.jpg", "a/1.cls", "__x__", "2.left.jpg"]))
    [('a/1', [0, 1]), ('2', [3])]
    """
    key, rows = "", list[int]()
    for row, name in enumerate(names):
        match = _KEY.fullmatch(name)
        if match is None or _META.match(name):
            continue
        # Only neighbours belong together: the same key further on is another sample.
        if match[1] != key and rows:
            yield key, rows
            rows = []
        key = match[1]
        rows.append(row)
    if rows:
        yield key, rows


def _label(image: _Image, member: str, field: str) -> str:
    if image.text is None:
        raise DataError(
            f"the sample of {image.url} has no {member}, only {', '.join(image.others)}; "
            'say where the labels are: labels=".cls", ".json:field", "foldernames", ...',
            "no member",
            url=image.url,
        )
    if not field and not image.text.strip():
        raise DataError(f"the {member} beside {image.url} is empty", "empty", url=image.url)
    if not field:
        return image.text.strip()
    try:
        label = json.loads(image.text)[field]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"the .json beside {image.url} has no field {field!r} "
            f"({type(error).__name__}: {error})",
            "no field",
            url=image.url,
        ) from None
    # A bool is an int for Python, but nobody means a class "True".
    if isinstance(label, bool) or not isinstance(label, (str, int)):
        raise DataError(
            f"the .json beside {image.url} has {field}={reprlib.repr(label)}; a label must be a "
            "text or an integer",
            "label type",
            url=image.url,
        )
    return str(label)


def _members(folder: Folder, tars: Sequence[FileInfo], chosen: Sequence[_Image]) -> Members:
    return Members(
        Files.of(folder, tars),
        Texts.of(image.name for image in chosen),
        np.array([image.tar for image in chosen], np.int32),
        np.array([image.start for image in chosen], np.int64),
        np.array([image.size for image in chosen], np.int64),
    )
