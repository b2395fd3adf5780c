"""What lies between stores and what reads them: files, listings, sources. Runs anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import xxhash

OnProgress = Callable[[int], object]  # gets the number of files found so far


class FileRef(NamedTuple):
    """What is kept of a file to read it: path below the source, size in bytes, version.

    `version` is 32 bits of the ETag, 0 where the store has none. A size of 0 is not checked.
    """

    path: str
    size: int
    version: int = 0


class FileInfo(NamedTuple):
    """One file of a listing: path below the folder, size in bytes, ETag ("" where there is none).

    A store that knows no sizes gives 0.
    """

    path: str
    size: int
    etag: str

    @property
    def version(self) -> int:
        """32 bits that change when the ETag does; 0 for none, and never for one."""
        return (xxhash.xxh32_intdigest(self.etag.encode()) or 1) if self.etag else 0

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


def listing(files: Iterable[FileInfo], folders: Iterable[str]) -> Listing:
    """A listing of what was found at any depth, and of sub-folders that may hold no file."""
    seen = [file for file in files if not _is_hidden(file.path)]
    names = {file.path.split("/", 1)[0] for file in seen if "/" in file.path}
    names |= {name for name in folders if not _is_hidden(name)}
    return Listing(sorted(seen), sorted(names))


def _is_hidden(path: str) -> bool:
    return path.startswith(".") or "/." in path
