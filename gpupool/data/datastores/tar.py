"""Labelled images in tar files, laid out as WebDataset does. Runs anywhere; no torch at import.

Neighbours in a tar whose names are the same up to the first dot of the last part are one sample:

    train-000.tar:  cat01.jpg  cat01.cls  dog07.jpg  dog07.cls  ...

What lies where in a tar is kept in the cache folder of this host; nothing is written beside it.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from gpupool.core.errors import DataError, DataNotFoundError
from gpupool.core.progress import progress
from gpupool.core.terminal import without_controls
from gpupool.data.cache.cache import kept
from gpupool.data.cache.cache_folder import cache_folder
from gpupool.data.datastores.base import Datastore
from gpupool.data.datastores.images import list_folder
from gpupool.data.datastores.labels import Labels, labelled
from gpupool.data.datastores.table import Files
from gpupool.data.datastores.told import IMAGE_EXTENSIONS, warn_of_pictures
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileRef, Source
from gpupool.data.stores.threads import in_threads

# The name up to the first dot of its last part.
_KEY = re.compile(r"((?:.*/|)[^.]+)[.][^/]*", re.DOTALL)
_AT_ONCE = 16  # tars
_RANGE_BYTES = 1 << 22  # what a store sends in the time of another request, about
_KEPT_BYTES = 1 << 30  # of indices
_MAX_HEADER_BYTES = 1 << 14  # of a name or attributes; Python takes seconds for longer hostile ones
# Labels are kept in memory and in the index: a member this large is no label.
_MAX_TEXT_BYTES = 1 << 24


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
        tars = _find_tars(os.fspath(url), dict(storage_options or {}))
        where = labels if isinstance(labels, str) and labels.startswith(".") else ""
        suffix, _, field = where.partition(":")
        extensions = [extensions] if isinstance(extensions, str) else extensions
        endings = tuple(extension.lower() for extension in extensions)
        rows, paths, texts, names = list[tuple[int, ...]](), list[str](), list[str](), list[str]()
        with progress("Reading headers", len(tars), "tars") as bar:
            index = in_threads(partial(_kept_members, suffix=suffix.lower()), tars, _AT_ONCE)
            for number, (tar, members) in enumerate(zip(tars, index, strict=True)):
                for image, label in _samples(tar, members, endings, suffix, field):
                    rows.append((number, tar.file.version, image.size, image.start))
                    paths.append(image.name)
                    texts.append(label)
                names += [member.name for member in members]
                bar.advance()
        warn_of_pictures(names, extensions)
        if not rows:
            raise DataNotFoundError(
                f"the {len(tars):,} tars at {tars[0].shown_url} hold no images with extension "
                f"{', '.join(extensions)}",
                "nothing",
            )
        files = Files.of(tars, paths, rows)
        known = texts if suffix else None
        kept, indices, classes = labelled(paths, files.url, labels, classes, known)
        super().__init__((files.take(kept),), indices, classes)


class Member(NamedTuple):
    """A regular file in a tar: where its contents start, and how many bytes they are.

    `text` is its contents where it ends in the suffix that was asked for.
    """

    name: str
    start: int
    size: int
    text: str


@dataclass(frozen=True)
class Tar:
    """The members of a tar as a `Source`: `start` is where one begins in the tar."""

    source: Source
    file: FileRef

    @property
    def shown_url(self) -> str:
        """Where the tar lies, as it may be printed."""
        return self.source.shown_url

    def name(self, path: str) -> str:
        """The URL of the tar, and the member's name behind it."""
        # A name in a tar may hold anything, and the URL is printed.
        return without_controls(f"{self.source.name(self.file.path)}/{path}")

    def read(self, file: FileRef, start: int = 0, length: int | None = None) -> bytes:
        """The contents of a member, by one range; raises what `Source.read` raises."""
        return self.source.read(self.file, start, file.size)


# ---- what is found --------------------------------------------------------------------------


def _find_tars(url: str, options: Mapping[str, Any]) -> list[Tar]:
    """The tars that are meant, sorted by path."""
    parent, slash, last = url.rpartition("/")
    is_named = last.lower().endswith(".tar") or "*" in last
    folder = Folder((parent or slash or ".") if is_named else url, options)
    # One listing has sizes and versions of all. `*` means no folders below, as in a shell.
    files = [file for file in list_folder(folder) if not (is_named and "/" in file.path)]
    pattern = last.lower() if is_named else "*.tar"
    tars = [Tar(folder, file) for file in files if fnmatch(file.path.lower(), pattern)]
    if not tars:
        raise DataNotFoundError(
            f"{folder.shown_url} holds no {pattern}; compressed ones must be unpacked first, and "
            "several are named by `*`",
            "nothing",
        )
    return tars


def _samples(
    tar: Tar, members: Iterable[Member], endings: tuple[str, ...], suffix: str, field: str
) -> Iterator[tuple[Member, str]]:
    """The image of each sample of a tar that has one, and its label, "" without a suffix."""

    def key_of(member: Member) -> str:
        match = _KEY.fullmatch(member.name)
        return match[1] if match else ""

    # Only neighbours belong together: the same key further on is another sample.
    for key, found in groupby(members, key_of):
        sample = {member.name.lower(): member for member in found}
        images = [member for name, member in sample.items() if key and name.endswith(endings)]
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


# ---- headers --------------------------------------------------------------------------------


def _kept_members(tar: Tar, suffix: str) -> list[Member]:
    """The members of a tar, and the contents of those that end in `suffix` ("" for none); from the
    cache folder, if it has a version and was read before.

    Raises DataError for a damaged tar or a folder that cannot be made, and what `Source.read` does.
    """
    url, size, version = tar.source.name(tar.file.path), tar.file.size, tar.file.version
    if not version:
        return _members(tar, suffix)
    key = f"{url}\0{size} {version} {suffix}"
    packed = kept(
        cache_folder("tars"), _KEPT_BYTES, key, lambda: json.dumps(_members(tar, suffix)).encode()
    )
    return [Member(*row) for row in json.loads(packed)]


def _members(tar: Tar, suffix: str) -> list[Member]:
    """By its headers. Raises DataError if it is damaged or compressed."""
    name = tar.source.name(tar.file.path)
    members = []
    try:
        file: Any = _Headers(tar)
        # "r:" refuses compressed tars, which "r" reads: their members are no ranges of the file.
        with tarfile.open(fileobj=file, mode="r:") as opened:
            for found in opened:
                # tarfile would go back to a header it has read, and so for ever
                if found.size < 0 or opened.offset < found.offset_data:
                    raise tarfile.ReadError(f"a negative size at byte {found.offset:,}")
                if not found.isreg():
                    continue
                # Its bytes in the tar are not its contents, so a range would be wrong.
                if found.sparse is not None:
                    raise tarfile.ReadError(f"{found.name} is a sparse file")
                is_text = suffix and found.name.lower().endswith(suffix)
                if is_text and found.size > _MAX_TEXT_BYTES:
                    raise tarfile.ReadError(f"the label {found.name} has {found.size:,} bytes")
                content = file.at(found.offset_data, found.size) if is_text else b""
                text = content.decode(errors="replace")
                members.append(Member(found.name, found.offset_data, found.size, text))
            # tarfile takes a header that is damaged or cut off for the end, without a word
            if file.at(opened.offset, tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.ReadError(f"no header at byte {opened.offset:,}")
    except DataError:
        raise
    except Exception as error:  # of hostile headers tarfile raises whatever they lead to
        # The text of a hostile file's error may be empty.
        reason = without_controls(str(error)) or type(error).__name__
        raise DataError(
            f"{name} is damaged, or no tar file that can be read by parts ({reason}); pack it "
            "again, without compression",
            "no tar",
            url=name,
        ) from None
    return members


class _Headers:
    """A tar for tarfile: what lies between two headers comes with them, which is quicker than a
    request for each header.
    """

    def __init__(self, tar: Tar) -> None:
        self._tar = tar
        self._position = self._start = 0
        self._data = b""  # from `_start` on

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, size: int) -> bytes:
        """The bytes of a header, fewer only at the end."""
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        data = self.at(self._position, size)
        self._position += len(data)
        return data

    def at(self, position: int, size: int) -> bytes:
        """The bytes from a position on, fewer only at the end."""
        end = min(position + size, self._tar.file.size)
        if not self._start <= position <= end <= self._start + len(self._data):
            self._start = position
            wanted = max(size, _RANGE_BYTES)
            self._data = self._tar.source.read(self._tar.file, position, wanted)
        return self._data[position - self._start : end - self._start]
