"""A folder of files at one URL, in any store. Runs anywhere.

    folder = Folder("s3://photos/train")
    for file in folder.list_files().files:
        data = folder.read(file.ref)

A `Folder` reads from the store; `Cached` (cache.py) is a source that reads through the disk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpupool.core.errors import DataError, DataNotFoundError, SampleError
from gpupool.core.urls import refuse_typo, without_passwords
from gpupool.core.wire.environ import note_use
from gpupool.data.stores import store_errors
from gpupool.data.stores.interface import Content, FileRef, Listing, OnProgress, Store, version_of
from gpupool.data.stores.retry import GaveUpError, Tries, counts

T = TypeVar("T")


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
        refuse_typo(url)
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
        return store_errors.shown_name(self.url, path)

    def list_files(self, on_progress: OnProgress = lambda _: None) -> Listing:
        """All files below this folder, at any depth.

        `on_progress` is called now and then, in this thread, with how many there are so far.
        Raises DataNotFoundError where there are none, CredentialsError or DataError otherwise.
        """
        found = self._ask("", lambda store: store.list_files(on_progress))
        if not found.files:
            raise DataNotFoundError(
                store_errors.nothing_at(self.shown_url), "missing", url=self.shown_url
            )
        note_use(self.url)
        return found

    def read(self, file: FileRef, start: int = 0, length: int | None = None) -> bytes:
        """A whole file, or `length` bytes of it from `start` (fewer at its end).

        Raises SampleError naming the file if it is missing, empty, or other than `file` says;
        CredentialsError, and DataError when the store keeps failing.
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
        raise store_errors.store_error(
            fault, self.url, self.storage_options, path, tries=tries, expires_at=ends
        ) from None

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
            raise self._changed(file, f"{file.size:,} bytes then, {size:,} now")
        if file.size and len(data) != expected:
            raise self._changed(file, f"not of {file.size:,} bytes any more")
        if file.version and etag and version_of(etag) != file.version:
            raise self._changed(file, f"its ETag is {etag} now")

    def _changed(self, file: FileRef, how: str) -> SampleError:
        return store_errors.changed(self.name(file.path), how)

    def _store(self) -> Store:
        store: Store | None = self.__dict__.get("_opened")
        if store is None:
            store = _open(self.url, self.storage_options)
            self.__dict__["_opened"] = store  # frozen in what it is, not in what it keeps
        return store


def _open(url: str, storage_options: Mapping[str, Any]) -> Store:
    from gpupool.data.stores import (
        fsspec_store,
        objects,
        s3,  # and with them fsspec
    )
    from gpupool.data.stores.s3_options import split_url

    place, options = split_url(url), s3.plain_options(storage_options)
    if place is None or options is None:
        return fsspec_store.Files(url, storage_options)
    name, prefix = place
    others = fsspec_store.Files(url, storage_options)
    return objects.Objects(s3.bucket(name, options), prefix, others)
