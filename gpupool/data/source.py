"""What can be read: files below one URL; the interface of stores and caches. Runs anywhere.

    folder = Folder("s3://photos/train")
    for file in folder.list_files().files:
        data = folder.read(file.ref)

A `Folder` reads from the store; `Cached` (cache.py) is a source that reads through the disk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import xxhash

from gpupool.core.errors import DataError, DataNotFoundError, SampleError
from gpupool.core.masking import without_passwords
from gpupool.core.terminal import without_controls
from gpupool.data import faults
from gpupool.data.retry import GaveUpError, Tries, counts

OnProgress = Callable[[int], object]  # gets the number of files found so far
T = TypeVar("T")


def version_of(etag: str) -> int:
    """32 bits that change when the ETag does; 0 for none, and never for one."""
    return (xxhash.xxh32_intdigest(etag.encode()) or 1) if etag else 0


class FileRef(NamedTuple):
    """What is kept of a file to read it: path below the source, size in bytes, version.

    `version` is `version_of` its ETag, 0 where the store has none. A size of 0 is not checked.
    """

    path: str
    size: int
    version: int = 0


class FileInfo(NamedTuple):
    """One file of a listing: path below the folder, size in bytes, ETag ("" where there is none).

    A store that does not tell sizes gives 0.
    """

    path: str
    size: int
    etag: str

    @property
    def version(self) -> int:
        """32 bits of the ETag, 0 where there is none."""
        return version_of(self.etag)

    @property
    def ref(self) -> FileRef:
        """What `Source.read` takes."""
        return FileRef(self.path, self.size, self.version)


class Listing(NamedTuple):
    """What lies below a folder: its files sorted by path, and the names of its sub-folders, sorted.

    Hidden files and folders (whose name starts with a dot) are left out.
    """

    files: list[FileInfo]
    folders: list[str]


class Content(NamedTuple):
    """What a store gave: bytes; size and ETag of the whole file, None and "" where not told."""

    data: bytes
    size: int | None
    etag: str


class Source(Protocol):
    """Files that can be read by many threads at once; pickles without connections."""

    @property
    def shown_url(self) -> str:
        """Where the files lie, as it may be printed."""

    def name(self, path: str) -> str:
        """The printable URL of a file."""

    def read(
        self, file: FileRef, start: int = 0, length: int | None = None, *, fresh: bool = False
    ) -> bytes:
        """A whole file, or `length` bytes of it from `start`; waits without the GIL.

        `fresh`: from the store itself, past all caches.

        Raises SampleError (missing, empty, or changed since it was listed), CredentialsError, and
        DataError when the store goes on failing.
        """


class Store(Protocol):
    """One kind of store; raises whatever its library raises, GaveUpError after many tries."""

    @property
    def expires_at(self) -> float | None:
        """When the credentials in use end, in seconds since 1970, if that is known."""

    def get(self, path: str, start: int, length: int | None) -> Content:
        """The bytes of a file from `start`, `length` of them or all."""

    def list_files(self, on_progress: OnProgress) -> Listing:
        """All files at any depth; none is no error."""


@dataclass(frozen=True)
class Folder:
    """A folder at any fsspec URL: s3://, gs://, file paths, memory:// ... A `Source`.

    It is the URL and the options; connections are made when they are needed, renewed when AWS_*
    variables change, and not pickled. What may pass is tried again, under a budget, and counted
    in `retry.counts`.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        url = os.fspath(self.url)
        if "://" not in url and "::" not in url:
            # An engine may have another working directory.
            url = os.path.abspath(os.path.expanduser(url))
        else:
            url = re.sub(r"(?<![:/])/+$", "", url)  # and "file:///" stays what it is
        object.__setattr__(self, "url", url)

    def __repr__(self) -> str:
        return f"Folder({self.shown_url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "storage_options": self.storage_options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def shown_url(self) -> str:
        """The URL as it may be printed: without the password or signature it may hold."""
        return without_passwords(self.url)

    def name(self, path: str) -> str:
        """The printable URL of a file of this folder: what steers a terminal in it is escaped."""
        url, path = self.shown_url, without_passwords(path)
        return without_controls(
            f"{url}{path}" if not path or url.endswith("/") else f"{url}/{path}"
        )

    def list_files(self, on_progress: OnProgress = lambda _: None) -> Listing:
        """All files below this folder, at any depth.

        `on_progress` is called now and then, in this thread, with how many there are so far.
        Raises DataNotFoundError where there are none, CredentialsError or DataError otherwise.
        """
        found = self._ask("", lambda store: store.list_files(on_progress))
        if not found.files:
            raise DataNotFoundError(faults.nothing_at(self.shown_url))
        return found

    def read(
        self, file: FileRef, start: int = 0, length: int | None = None, *, fresh: bool = False
    ) -> bytes:
        """A whole file, or `length` bytes of it from `start` (fewer at its end).

        Raises SampleError naming the file if it is missing, empty, or other than `file` says;
        CredentialsError, and DataError when the store goes on failing.
        """
        if file.size and (start or length is not None):
            left = max(0, file.size - start)
            length = left if length is None else min(length, left)
        if length == 0:
            return b""
        path = file.path
        content = self._ask(path, lambda store: store.get(path, start, length))
        counts.add(reads=1, bytes=len(content.data))
        self._check(file, content, start, length)
        return content.data

    def _ask(self, path: str, operation: Callable[[Store], T]) -> T:
        """What the store gives, or the one sentence on what it raises."""
        store: Store | None = None
        tries: Tries | None = None
        try:
            store = self._store()
            return operation(store)
        except DataError:
            raise  # says it already
        except GaveUpError as gave_up:
            fault, tries = gave_up.error, gave_up.tries
        except Exception as error:  # file systems raise whatever they like
            fault = error
        ends = store.expires_at if store is not None else None
        raise faults.store_error(fault, self, path, tries=tries, expires_at=ends) from None

    def _check(self, file: FileRef, content: Content, start: int, length: int | None) -> None:
        """Raise SampleError if the file is empty, or another one than was listed.

        Where its size is known, `length` is within it.
        """
        data, size, etag = content
        if size == 0 or (size is None and not data and not start):
            name = self.name(file.path)
            raise SampleError(f"{name} is empty (0 bytes)", name, "empty")
        expected = file.size if length is None else length
        if file.size and size is not None and size != file.size:
            raise faults.changed(self, file.path, f"{file.size:,} bytes then, {size:,} now")
        if file.size and len(data) != expected:
            raise faults.changed(self, file.path, f"not of {file.size:,} bytes any more")
        if file.version and etag and version_of(etag) != file.version:
            raise faults.changed(self, file.path, f"its ETag is {etag} now")

    def _store(self) -> Store:
        store: Store | None = self.__dict__.get("_opened")
        if store is None:
            store = _open(self.url, self.storage_options)
            self.__dict__["_opened"] = store  # frozen in what it is, not in what it keeps
        return store


def listing(files: Iterable[FileInfo], folders: Iterable[str]) -> Listing:
    """A listing of what was found, at any depth, with the hidden left out.

    `folders` are sub-folders that may hold no file; the others follow from the files.
    """
    seen = [file for file in files if not _is_hidden(file.path)]
    names = {file.path.split("/", 1)[0] for file in seen if "/" in file.path}
    names |= {name for name in folders if not _is_hidden(name)}
    return Listing(sorted(seen), sorted(names))


def _is_hidden(path: str) -> bool:
    return path.startswith(".") or "/." in path


def _open(url: str, storage_options: Mapping[str, Any]) -> Store:
    from gpupool.data import filesystems, objects, s3
    from gpupool.data.s3_options import split_url

    place, options = split_url(url), s3.plain_options(storage_options)
    if place is None or options is None:
        return filesystems.Files(url, storage_options)
    name, prefix = place
    others = filesystems.Files(url, storage_options)
    return objects.Objects(s3.bucket(name, options), prefix, others)
