"""What lies between stores and what reads them: files, and sources of them. Runs anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import xxhash

OnProgress = Callable[[int], object]  # gets the number of files found so far


class FileRef(NamedTuple):
    """A file of a source: path below it, size in bytes (0 where that is not known), version.

    `version` is 32 bits of the ETag, 0 where the store has none.
    """

    path: str
    size: int = 0
    version: int = 0


class Source(Protocol):
    """Files that can be read by many threads at once; pickles without connections."""

    @property
    def shown_url(self) -> str:
        """Where the files lie, as it may be printed."""

    def name(self, path: str) -> str:
        """The printable URL of a file."""

    def read(self, file: FileRef, start: int = 0, length: int | None = None) -> bytes:
        """A whole file, or `length` bytes of it from `start`; waits without the GIL.

        Raises SampleError (missing, empty, or changed since it was listed), CredentialsError, and
        DataError when the store keeps failing.
        """


def version_of(etag: str) -> int:
    """32 bits that change when the ETag does; 0 for none, and never for one."""
    return (xxhash.xxh32_intdigest(etag.encode()) or 1) if etag else 0


def visible(files: Iterable[FileRef]) -> list[FileRef]:
    """Those of a listing, sorted by path, without hidden ones, below any name that starts with a
    dot, and what marks a folder: it is empty, and has no extension.
    """

    def is_seen(path: str, size: int) -> bool:
        is_hidden = path.startswith(".") or "/." in path
        return not is_hidden and (size > 0 or "." in path.rpartition("/")[2])

    return sorted(file for file in files if is_seen(file.path, file.size))
