"""What lies where in a tar file on a store: read once by ranges, kept on this host. No torch.

Never written beside the tars: only into the cache folder, keyed by URL, size and version.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpupool.core.errors import DataError
from gpupool.core.terminal import without_controls
from gpupool.data.cache.cache import Cached
from gpupool.data.cache.cache_folder import cache_folder
from gpupool.data.datastores.told import warn
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


def list_members(
    source: Source, tars: Sequence[FileRef], suffix: str, on_progress: Callable[[int, int], None]
) -> Iterator[list[Member]]:
    """The members of each tar, in its order, many tars at once; those with a version come from the
    cache folder if they were read before.

    `suffix` of the members whose contents are kept too (".cls"; "" for none). Raises DataError for
    a damaged tar, and what `Source.read` raises.
    """
    index: Source = _Index(source, suffix)
    try:
        index = Cached(index, _KEPT_GIB, str(cache_folder("tars")))
        index.open()
    except DataError as error:
        warn(f"the index of the tars is not kept: {error}")
        index = _Index(source, suffix)
    with reading_threads(_AT_ONCE, "gpupool-index") as pool:
        for done, packed in enumerate(pool.map(index.read, tars), start=1):
            on_progress(done, len(tars))
            yield [Member(*row) for row in json.loads(zlib.decompress(packed))]


@dataclass(frozen=True)
class _Index:
    """A `Source` that gives the members of a tar in the place of the tar, for a cache to keep."""

    source: Source
    suffix: str

    @property
    def shown_url(self) -> str:
        return self.source.shown_url

    def name(self, path: str) -> str:
        return f"{self.source.name(path)} {self.suffix}"

    def read(self, file: FileRef, start: int = 0, length: int | None = None) -> bytes:
        members = read_members(Tar(self.source, file), self.suffix)
        return zlib.compress(json.dumps(members).encode(), 1)


def read_members(tar: Tar, suffix: str) -> list[Member]:
    """The members of one tar, by its headers. Raises DataError if it is damaged or compressed."""
    name = tar.source.name(tar.file.path)
    members = []
    try:
        file = _Headers(_Ranges(tar), _RANGE_BYTES)
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


class _Headers(io.BufferedReader):
    """A tar for tarfile: what lies between two headers comes with them, which is quicker than a
    request for each header.
    """

    def read(self, size: int | None = -1) -> bytes:
        """The bytes of a header, fewer only at the end."""
        if size is None or not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size or 0:,} bytes")
        return super().read(size)

    def at(self, position: int, wanted: int) -> bytes:
        """The bytes from a position on, fewer only at the end."""
        self.seek(position)
        return super().read(wanted)


class _Ranges(io.RawIOBase):
    """A file on a store."""

    def __init__(self, tar: Tar) -> None:
        self._tar = tar
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        size = self._tar.file.size
        self._position = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence, size) + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        length = min(len(buffer), max(0, self._tar.file.size - self._position))
        if length:
            buffer[:length] = self._tar.source.read(self._tar.file, self._position, length)
        self._position += length
        return length
