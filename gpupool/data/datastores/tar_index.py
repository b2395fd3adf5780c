"""What lies where in a tar file on a store: read once by ranges, kept on this host. No torch.

Never written beside the tars: only into the cache folder, keyed by URL, size and version.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpupool.core.errors import DataError
from gpupool.core.terminal import without_controls
from gpupool.data.cache.cache import Cached
from gpupool.data.cache.cache_folder import cache_folder
from gpupool.data.stores.interface import FileRef, Source
from gpupool.data.stores.threads import reading_threads

_AT_ONCE = 16  # tars
_RANGE_BYTES = 1 << 22  # what a store sends in the time of another request, about
_KEPT_GIB = 1  # of indices
_MAX_HEADER_BYTES = 1 << 14  # of a name or attributes; Python takes seconds for longer hostile ones
# Labels are kept in memory and in the index: a member this large is no label.
_MAX_TEXT_BYTES = 1 << 24


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


@dataclass(frozen=True)
class _Index:
    """A `Source` that gives the members of a tar in the place of the tar, for a cache to keep."""

    source: Source
    suffix: str

    @property
    def shown_url(self) -> str:
        return self.source.shown_url

    def name(self, path: str) -> str:
        return f"{self.source.name(path)} members {self.suffix}"

    def read(self, file: FileRef, start: int = 0, length: int | None = None) -> bytes:
        return json.dumps(read_members(Tar(self.source, file), self.suffix)).encode()


def list_members(tars: Sequence[Tar], suffix: str) -> Iterator[list[Member]]:
    """The members of each tar, in its order, many tars at once; those with a version come from the
    cache folder if they were read before.

    `suffix` of the members whose contents are kept too (".cls"; "" for none). Raises DataError for
    a damaged tar or a folder that cannot be made, and what `Source.read` raises.
    """
    index = Cached(_Index(tars[0].source, suffix), _KEPT_GIB, str(cache_folder("tars")))
    with reading_threads(_AT_ONCE, "gpupool-index") as pool:
        for packed in pool.map(index.read, (tar.file for tar in tars)):
            yield [Member(*row) for row in json.loads(packed)]


def read_members(tar: Tar, suffix: str) -> list[Member]:
    """The members of one tar, by its headers. Raises DataError if it is damaged or compressed."""
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
        from fsspec.caching import ReadAheadCache

        def fetch(start: int, end: int) -> bytes:
            return tar.source.read(tar.file, start, end - start)

        self._ranges = ReadAheadCache(_RANGE_BYTES, fetch, tar.file.size)
        self._position = 0

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
        data: bytes = self._ranges._fetch(position, position + size)
        return data
