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
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from gpupool.core.errors import DataError
from gpupool.data.cache.cache_folder import cache_folder
from gpupool.data.datastores.compact_arrays import Texts
from gpupool.data.stores.interface import FileRef, Source
from gpupool.data.stores.threads import reading_threads

_FORMAT = 1  # of the files in the cache folder
_AT_ONCE = 16  # tars
_FIRST_BYTES = 1 << 16
_MOST_BYTES = 1 << 22
_SKIP_BYTES = 1 << 22  # what a store sends in the time of another request, about
_MAX_HEADER_BYTES = 1 << 14  # of a name or attributes; Python takes seconds for longer hostile ones
# Labels are kept in memory and in the index: a member this large is no label.
_MAX_TEXT_BYTES = 1 << 24


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
    source: Source,
    tars: Sequence[FileRef],
    suffix: str,
    on_progress: Callable[[int, int], None],
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

    def one(tar: FileRef) -> TarIndex:
        if folder is None or tar.version == 0:  # without a version a change would not be seen
            return read_index(source, tar, suffix)
        path = folder / f"{_key(source, tar, suffix)}.npz"
        index = _load(path)
        if index is None:
            index = read_index(source, tar, suffix)
            _save(path, index)
        return index

    found = []
    with reading_threads(_AT_ONCE, "gpupool-index") as pool:
        for index in pool.map(one, tars):
            found.append(index)
            on_progress(len(found), len(tars))
    return found


def read_index(source: Source, tar: FileRef, suffix: str) -> TarIndex:
    """The index of one tar, from its headers. Raises DataError if it is damaged or compressed."""
    name = source.name(tar.path)
    names, starts, sizes, texts = [], [], [], []
    try:
        file = _Ranges(source, tar)
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
                    raise DataError(
                        f"{name} holds a sparse file, {member.name}; pack it again",
                        "sparse",
                        url=name,
                    )
                is_text = suffix and member.name.lower().endswith(suffix)
                if is_text and member.size > _MAX_TEXT_BYTES:
                    raise DataError(
                        f"{name}: the label {member.name} has {member.size:,} bytes",
                        "too large",
                        url=name,
                    )
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
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{name} is damaged or no tar file ({reason}); compressed ones must be unpacked first",
            "no tar",
            url=name,
        ) from None
    return TarIndex(
        Texts.of(names), np.array(starts, np.int64), np.array(sizes, np.int64), Texts.of(texts)
    )


class _Ranges(io.RawIOBase):
    """A file on a store, for tarfile.

    Read on, the ranges grow to a few MiB, and what lies between two headers comes with them: that
    is quicker than a request for each header. Over more than that it jumps.
    """

    def __init__(self, source: Source, file: FileRef) -> None:
        self._source = source
        self._file = file
        self._position = 0
        self._start = 0  # of what is in memory
        self._data = b""
        self._next_bytes = _FIRST_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        here = self._position - self._start
        if not 0 <= here < len(self._data):
            if self._position >= self._file.size:
                return 0
            self._load()
            here = 0
        part = self._data[here : here + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def read(self, size: int | None = -1) -> bytes:
        """All of `size` bytes of headers, as tarfile expects of a file, fewer only at the end."""
        if size is None or not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size or 0:,} bytes")
        return self.at(self._position, size)

    def at(self, position: int, wanted: int) -> bytes:
        """The bytes from a position on, fewer only at the end."""
        self.seek(position)
        parts = []
        while wanted > 0 and (part := super().read(wanted)):
            parts.append(part)
            wanted -= len(part)
        return b"".join(parts)

    def _load(self) -> None:
        # A jump over a large member starts small again: what follows may be another large one.
        gap = self._position - (self._start + len(self._data))
        goes_on = 0 <= gap < _SKIP_BYTES
        self._next_bytes = min(2 * self._next_bytes, _MOST_BYTES) if goes_on else _FIRST_BYTES
        self._start = self._position
        length = min(self._next_bytes, self._file.size - self._start)
        self._data = self._source.read(self._file, self._start, length)


def _key(source: Source, tar: FileRef, suffix: str) -> str:
    # A changed tar has another version, so its old index is never read; nothing has to expire.
    facts = (_FORMAT, source.name(tar.path), tar.size, tar.version, suffix)
    return str(xxhash.xxh3_128_hexdigest(repr(facts).encode()))


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
    arrays: dict[str, Any] = {
        "names": np.frombuffer(index.names.blob, np.uint8),
        "name_offsets": index.names.offsets,
        "starts": index.starts,
        "sizes": index.sizes,
        "texts": np.frombuffer(index.texts.blob, np.uint8),
        "text_offsets": index.texts.offsets,
    }
    try:
        # In the same folder, as `os.replace` is atomic within one file system only.
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            np.savez_compressed(file, **arrays)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"the index of a tar is not kept: {path}: {error.strerror}", stacklevel=2)
