"""Labelled images in tar files, laid out as WebDataset does. Runs anywhere; no torch at import.

train-000.tar:  cat01.jpg  cat01.cls  dog07.jpg  dog07.cls  ...
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from itertools import groupby
from os.path import splitext
from typing import Any

from gpupool.core.errors import DataError, DataNotFoundError
from gpupool.core.progress import progress
from gpupool.core.terminal import without_controls
from gpupool.data.datastores.base import Datastore, Files, Row
from gpupool.data.datastores.images import (
    IMAGE_EXTENSIONS,
    OTHER_EXTENSIONS,
    warn_left_out,
    warn_of_pictures,
)
from gpupool.data.datastores.labels import Labels
from gpupool.data.stores.cache import cache_folder, kept
from gpupool.data.stores.folder import FileRef, Folder, Source
from gpupool.data.stores.threads import in_threads

_AT_ONCE = 16  # tars
_RANGE_BYTES = 1 << 22  # what a store sends in the time of another request, about
_KEPT_BYTES = 1 << 30  # of indices
_MAX_TEXT_BYTES = 1 << 14  # of names, attributes, labels; Python takes seconds for hostile ones
_COMPRESSED = {".bz2", ".gz", ".tgz", ".xz", ".zst"}
Sample = tuple[str, int, int, str | None]  # of an image: name, start, size; and the label beside
Found = tuple[list[Sample], list[str]]  # of a tar; and the names of other pictures


class TarDatastore(Datastore):
    """The images in the tars at `url`, one label each; does all that an `ImageDatastore` does.

    The headers of the tars are read here, once, and kept in `~/.cache/gpupool` (XDG_CACHE_HOME)
    for tars that have an ETag; an image is then read by its range, so counts are exact, and any
    order, split and number of ranks is possible. Samples without an image are left out.

        ds = TarDatastore("s3://photos/train-*.tar")

    Args:
        url: a folder whose .tar files at any depth are meant, a tar, or several: a last part with
            `*`. Any fsspec URL.
        labels: ".cls": the text of the sample's member of that name; or as of `ImageDatastore`,
            where an image's path is its name in the tar, and its URL that of the tar with the name
            behind it.
        extensions: of the members to take; one image in each sample.
        storage_options: for the file system of `url`.

    Raises as `ImageDatastore`, and DataError if a tar is damaged, or a sample has no label.
    """

    def __init__(
        self,
        url: str,
        *,
        labels: Labels = ".cls",
        extensions: str | Sequence[str] = IMAGE_EXTENSIONS,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        tars = _find_tars(os.fspath(url), dict(storage_options or {}))
        extensions = [extensions] if isinstance(extensions, str) else extensions
        endings = tuple(extension.lower() for extension in extensions)
        rows, texts, left = list[Row](), list[str | None](), list[str]()
        index = in_threads(partial(_kept_samples, endings=endings), tars, _AT_ONCE)
        with progress("Reading headers", len(tars), "tars") as bar:
            for number, (samples, others) in enumerate(index):
                left += others
                for path, start, size, text in samples:
                    rows.append((number, tars[number].file.version, size, start, path))
                    texts.append(text)
                bar.advance()
        warn_of_pictures(left, extensions)
        if not rows:
            raise DataNotFoundError(
                f"the {len(tars):,} tars at {tars[0].shown_url} hold no images with extension "
                f"{', '.join(extensions)}",
                "nothing",
            )
        files = Files.of(tars, rows)
        are_beside = isinstance(labels, str) and labels == ".cls"
        if are_beside and None in texts:
            url = files.url(texts.index(None))
            raise DataError(
                f"{url} has no .cls beside it; say what its class is: labels= a function of this "
                'URL, or "foldernames"',
                "no label",
                url=url,
            )
        self._fill(files, labels, texts if are_beside else ())


@dataclass(frozen=True)
class Tar:
    """The members of a tar as a `Source`: `start` is where one begins in the tar."""

    source: Source
    file: FileRef

    @property
    def shown_url(self) -> str:
        return self.source.shown_url

    def name(self, path: str) -> str:
        # A name in a tar may hold anything, and the URL is printed.
        return without_controls(f"{self.source.name(self.file.path)}/{path}")

    def read(self, file: FileRef, start: int = 0, length: int | None = None) -> bytes:
        return self.source.read(self.file, start, file.size)


def _find_tars(url: str, options: Mapping[str, Any]) -> list[Tar]:
    parent, slash, last = url.rpartition("/")
    is_named = last.lower().endswith(".tar") or "*" in last
    folder = Folder((parent or slash or ".") if is_named else url, options)
    # One listing has sizes and versions of all. `*` means no folders below, as in a shell.
    files = [file for file in folder.list_files() if not (is_named and "/" in file.path)]
    pattern = last.lower() if is_named else "*.tar"
    tars = [Tar(folder, file) for file in files if fnmatch(file.path.lower(), pattern)]
    if not tars:
        raise DataNotFoundError(
            f"{folder.shown_url} holds no {pattern}; compressed ones must be unpacked first, and "
            "several are named by `*`",
            "nothing",
        )
    if not is_named:
        warn_left_out((file.path for file in files), _COMPRESSED, "unpack them first")
    return tars


def _kept_samples(tar: Tar, endings: tuple[str, ...]) -> Found:
    """As `_samples`, of a tar that has a version once only."""
    url, size, version = tar.source.name(tar.file.path), tar.file.size, tar.file.version
    if not version:
        return _samples(tar, endings)
    key = "\0".join([url, f"{size} {version}", *endings])

    def read() -> bytes:
        return json.dumps(_samples(tar, endings)).encode()

    found: Found = json.loads(kept(cache_folder("tars"), _KEPT_BYTES, key, read))
    return found


def _samples(tar: Tar, endings: tuple[str, ...]) -> Found:
    """The image of each sample of a tar that has one, with the text of its .cls, if it has that."""
    url, samples, others = tar.source.name(tar.file.path), list[Sample](), list[str]()
    try:
        file: Any = _Headers(tar)
        # "r:" refuses compressed tars, which "r" reads: their members are no ranges of the file.
        with tarfile.open(fileobj=file, mode="r:") as opened:
            # Only neighbours belong together: the same key further on is another sample.
            for key, members in groupby(_regular(opened), _key_of):
                sample = {member.name.lower(): member for member in members}
                images = [one for name, one in sample.items() if key and name.endswith(endings)]
                others += [name for name in sample if splitext(name)[1] in OTHER_EXTENSIONS]
                if len(images) > 1:
                    raise DataError(
                        f"the sample {tar.name(key)} has {len(images)} images, {images[0].name} "
                        f"and {images[1].name}; say which: extensions=[...]",
                        "several images",
                        url=tar.name(key),
                    )
                text = sample.get(f"{key}.cls".lower())
                for image in images:
                    label = None
                    if text is not None:
                        content: bytes = file.at(text.offset_data, text.size)
                        label = content.decode(errors="replace").strip()
                    samples.append((image.name, image.offset_data, image.size, label))
            # tarfile takes a header that is damaged or cut off for the end, without a word
            if file.at(opened.offset, tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.ReadError(f"no header at byte {opened.offset:,}")
    except DataError:
        raise
    except Exception as error:  # of hostile headers tarfile raises whatever they lead to
        # The text of a hostile file's error may be empty.
        reason = without_controls(str(error)) or type(error).__name__
        raise DataError(
            f"{url} is damaged, or no tar file that can be read by parts ({reason}); pack it "
            "again, without compression",
            "no tar",
            url=url,
        ) from None
    return samples, others


def _regular(opened: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in opened:
        # tarfile would go back to a header it has read, and so for ever
        if member.size < 0 or opened.offset < member.offset_data:
            raise tarfile.ReadError(f"a negative size at byte {member.offset:,}")
        # Its bytes in the tar are not its contents, so a range would be wrong.
        if member.isreg() and member.sparse is not None:
            raise tarfile.ReadError(f"{member.name} is a sparse file")
        if member.isreg():
            yield member


def _key_of(member: tarfile.TarInfo) -> str:
    """The name up to the first dot of its last part; "" for what is part of no sample."""
    folder, slash, file = member.name.rpartition("/")
    stem, dot, _ = file.partition(".")
    return f"{folder}{slash}{stem}" if stem and dot else ""


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
        data = self.at(self._position, size)
        self._position += len(data)
        return data

    def at(self, position: int, size: int) -> bytes:
        """The bytes from a position on, fewer only at the end."""
        if not 0 <= size <= _MAX_TEXT_BYTES:
            raise tarfile.ReadError(f"a header or label of {size:,} bytes")
        end = min(position + size, self._tar.file.size)
        if not self._start <= position <= end <= self._start + len(self._data):
            self._start = position
            wanted = max(size, _RANGE_BYTES)
            self._data = self._tar.source.read(self._tar.file, position, wanted)
        return self._data[position - self._start : end - self._start]
