"""What lies where in a tar file on a store: read once by ranges, kept on this host. No torch.

Never written beside the tars: only into the cache folder, keyed by URL, size and version.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from gpupool.core.errors import DataError, SampleError
from gpupool.core.terminal import without_controls
from gpupool.data.cache.cache_folder import cache_folder
from gpupool.data.datastores.table import Texts
from gpupool.data.stores.interface import FileRef, Source
from gpupool.data.stores.threads import reading_threads

_FORMAT = 1  # of the files in the cache folder
_AT_ONCE = 16  # tars
_RANGE_BYTES = 1 << 22  # what a store sends in the time of another request, about
_MAX_HEADER_BYTES = 1 << 14  # of a name or attributes; Python takes seconds for longer hostile ones
# Labels are kept in memory and in the index: a member this large is no label.
_MAX_TEXT_BYTES = 1 << 24


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
        """The contents of a member, by one range; raises SampleError, and as `Source.read`."""
        name = self.name(file.path)
        if not file.size:
            raise SampleError(f"{name} is empty (0 bytes)", name, "empty")
        data = self.source.read(self.file, start, file.size)
        # A tar that was cut keeps its beginning: the range then comes back short, without an error.
        if len(data) != file.size:
            raise SampleError(
                f"{name} has changed: the tar ends before it; make the datastore again",
                name,
                "changed",
            )
        return data


@dataclass(frozen=True)
class TarIndex:
    """The regular files in a tar, in its order: names, where their contents start, and sizes.

    `texts` holds the contents of those that end in the suffix asked for, "" for the others.
    """

    names: Texts
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    texts: Texts


def index_tars(
    tars: Sequence[Tar], suffix: str, on_progress: Callable[[int, int], None]
) -> list[TarIndex]:
    """The index of each tar, many at once; those with a version come from the cache folder if they
    were read before.

    `suffix` of the members whose contents are kept too (".cls"; "" for none). Warns if the cache
    folder cannot be used, and continues without. Raises DataError for a damaged tar, and what
    `Source.read` raises.
    """
    try:
        folder: Path | None = cache_folder("tars")
    except DataError as error:
        folder = None
        warnings.warn(f"the index of the tars is not kept: {error}", stacklevel=4)

    def one(tar: Tar) -> TarIndex:
        if folder is None or not tar.file.version:  # a change would not be seen
            return read_index(tar, suffix)
        # A changed tar has another version, so its old index is never read.
        facts = (_FORMAT, tar.source.name(tar.file.path), *tar.file[1:], suffix)
        path = folder / f"{xxhash.xxh3_128_hexdigest(repr(facts).encode())}.npz"
        index = _load(path)
        if index is None:
            index = read_index(tar, suffix)
            _save(path, index)
        return index

    found = []
    with reading_threads(_AT_ONCE, "gpupool-index") as pool:
        for index in pool.map(one, tars):
            found.append(index)
            on_progress(len(found), len(tars))
    return found


def read_index(tar: Tar, suffix: str) -> TarIndex:
    """The index of one tar, from its headers. Raises DataError if it is damaged or compressed."""
    name = tar.source.name(tar.file.path)
    names, starts, sizes, texts = [], [], [], []
    try:
        file = _Headers(_Ranges(tar), _RANGE_BYTES)
        # "r:" refuses compressed tars, which "r" reads: their members are no ranges of the file.
        with tarfile.open(fileobj=file, mode="r:") as opened:
            for member in opened:
                # tarfile would go back to a header it has read, and so for ever
                if member.size < 0 or opened.offset < member.offset_data:
                    raise tarfile.ReadError(f"a negative size at byte {member.offset:,}")
                if not member.isreg():
                    continue
                # Its bytes in the tar are not its contents, so a range would be wrong.
                if member.sparse is not None:
                    raise tarfile.ReadError(f"{member.name} is a sparse file")
                is_text = suffix and member.name.lower().endswith(suffix)
                if is_text and member.size > _MAX_TEXT_BYTES:
                    raise tarfile.ReadError(f"the label {member.name} has {member.size:,} bytes")
                names.append(member.name)
                starts.append(member.offset_data)
                sizes.append(member.size)
                content = file.at(member.offset_data, member.size) if is_text else b""
                texts.append(content.decode(errors="replace"))
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
    positions, lengths = np.array(starts, np.int64), np.array(sizes, np.int64)
    return TarIndex(Texts.of(names), positions, lengths, Texts.of(texts))


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


def _load(path: Path) -> TarIndex | None:
    """The index in a file; None if there is none, or none that can be used."""
    try:
        # Without pickles: a file in the cache folder must not be able to run code.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return TarIndex(
                Texts(arrays["names"].tobytes(), arrays["name_offsets"]),
                arrays["starts"],
                arrays["sizes"],
                Texts(arrays["texts"].tobytes(), arrays["text_offsets"]),
            )
    except Exception:  # not there, or cut off by a crash of the machine: it is recreated
        return None


def _save(path: Path, index: TarIndex) -> None:
    """Put the index there at once or not at all; a full disk leaves none."""
    try:
        # In the same folder, as `os.replace` is atomic within one file system only.
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            np.savez_compressed(
                file,
                names=np.frombuffer(index.names.blob, np.uint8),
                name_offsets=index.names.offsets,
                starts=index.starts,
                sizes=index.sizes,
                texts=np.frombuffer(index.texts.blob, np.uint8),
                text_offsets=index.texts.offsets,
            )
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"the index of a tar is not kept: {path}: {error.strerror}", stacklevel=2)
