"""A folder to write to, at any fsspec URL: files are complete there or not there at all.

Runs anywhere; no torch. What may pass is tried again, credentials are renewed as for reading, and
every fault is one sentence that says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fsspec.implementations.local import LocalFileSystem

from gpupool.core.errors import CredentialsError, DataError
from gpupool.data.stores import store_errors
from gpupool.data.stores.error_kinds import trouble
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.fsspec_store import Files
from gpupool.data.stores.retry import GaveUpError

T = TypeVar("T")
_PARTS = ".gpupool-*.part"  # local files that are being written
_LEFT_S = 3600.0  # a part that nobody has written to for so long may be one that was cut off
_PROBE = "gpupool-probe"
# A folder of theirs that is not there is a bucket, which nobody wants to be made for a typo.
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci"}


@dataclass(frozen=True)
class Target:
    """A folder at a URL; made if it is not there, where there are folders. Any thread may use it.

    All methods raise DataError, or its CredentialsError, without any secret in it.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", self._folder.url)

    def name(self, path: str) -> str:
        """The printable URL of a file in it."""
        return self._folder.name(path)

    def put(self, path: str, data: bytes | bytearray | memoryview, *, is_new: bool = False) -> bool:
        """Write a file, in the place of an older one: whoever reads has the one or the other.

        It lasts through a power cut once this has returned. With `is_new` an older one stays, and
        False is returned. An object store is asked for it before: of two writers at one moment the
        later one wins there.
        """
        if is_new and self._do(path, lambda files, root: _exists(files, f"{root}/{path}")):
            return False

        def put_it(filesystem: Any, root: str) -> bool:
            full = f"{root}/{path}"
            if isinstance(filesystem, LocalFileSystem):
                return _write_local(Path(full), data, is_new)
            if not _protocols(filesystem) & _WITHOUT_FOLDERS:
                filesystem.makedirs(full.rpartition("/")[0], exist_ok=True)
            filesystem.pipe_file(full, bytes(data))
            return True

        return self._do(path, put_it, "writing")

    def get(self, path: str) -> bytes:
        """The bytes of a file."""
        return self._do(path, lambda filesystem, root: bytes(filesystem.cat_file(f"{root}/{path}")))

    def end(self, path: str, num_bytes: int) -> tuple[bytes, int]:
        """The last bytes of a file, and how many it has."""

        def end_it(filesystem: Any, root: str) -> tuple[bytes, int]:
            size = int(filesystem.size(f"{root}/{path}"))
            start = max(0, size - num_bytes)
            return bytes(filesystem.cat_file(f"{root}/{path}", start=start, end=size)), size

        return self._do(path, end_it)

    def names(self) -> list[str]:
        """The files in it, without its sub-folders; none if it is not there."""

        def list_it(filesystem: Any, root: str) -> list[str]:
            filesystem.invalidate_cache()
            try:
                found = filesystem.ls(root, detail=True)
            except FileNotFoundError:
                return []
            files = [one["name"] for one in found if one["type"] == "file"]
            return sorted(str(name).rpartition("/")[2] for name in files)

        return self._do("", list_it)

    def remove(self, path: str) -> None:
        """Remove a file; nothing if it is gone."""

        def remove_it(filesystem: Any, root: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                filesystem.rm_file(f"{root}/{path}")

        self._do(path, remove_it, "removing")

    def check(self) -> None:
        """Write a small file, read it back and remove it, and what cut-off writers have left.

        That are parts of ours, of this user, which nobody has written to for an hour nor has open
        to write.
        """
        self._do("", _require_bucket)
        probe = f"{_PROBE}-{secrets.token_hex(4)}"
        self.put(probe, b"probe")
        if self.get(probe) != b"probe":
            raise DataError(
                f"{self.name(probe)} does not hold what was written; check the store",
                "not kept",
                url=self.name(probe),
            )
        self.remove(probe)
        self._do("", _remove_parts)

    @property
    def _folder(self) -> Folder:
        return Folder(self.url, dict(self.storage_options))

    def _do(self, path: str, operation: Callable[[Any, str], T], doing: str = "reading") -> T:
        with self._faults(path, doing):
            return Files(self.url, self.storage_options).persisted(operation, doing)

    @contextmanager
    def _faults(self, path: str, doing: str) -> Iterator[None]:
        """What a file system raises inside, as one sentence."""
        try:
            yield
        except DataError:
            raise
        except GaveUpError as gave_up:
            fault, tries = gave_up.error, gave_up.tries
            error = store_errors.store_error(
                fault, self.url, self.storage_options, path, tries=tries, doing=doing
            )
            raise error from None
        except Exception as error:  # file systems raise whatever they like
            raise self._of_writing(error, path) from None

    def _of_writing(self, error: Exception, path: str) -> DataError:
        name, found = self.name(path), trouble(error)
        if found.kind == "denied":
            return CredentialsError(
                f"{name}: this access key may not write here; allow it to list, read, write and "
                "delete, or use another one",
                "read only",
                url=name,
            )
        if found.kind == "missing" and "://" in self.url:
            return DataError(
                f"{name}: there is no such bucket or folder; make it, or correct it",
                "missing",
                url=name,
            )
        if isinstance(error, OSError) and error.errno in _DISK:
            return DataError(f"{name} cannot be written: {_DISK[error.errno]}", "disk", url=name)
        return store_errors.store_error(error, self.url, self.storage_options, path)


_DISK = {
    errno.EFBIG: "the file is larger than is allowed here (ulimit -f); raise the limit",
    errno.ENOSPC: "the disk is full; make room, or give another folder",
    errno.EDQUOT: "your quota of the disk is used up; make room, or give another folder",
    errno.EROFS: "the disk is read-only; give another folder",
    errno.EACCES: "you may not write there; give a folder of yours",
    errno.EPERM: "you may not write there; give a folder of yours",
    errno.EEXIST: "there is a file where the folder should be; give another folder",
    errno.ENOTDIR: "a part of the path is a file; give another folder",
}


def _require_bucket(filesystem: Any, root: str) -> None:
    """Some stores make a bucket for the first file that is put there; a typo should be an error."""
    bucket = root.split("/")[0]
    if _protocols(filesystem) & _WITHOUT_FOLDERS:
        with contextlib.suppress(PermissionError):  # the answer to a write says why
            filesystem.info(bucket)


def _protocols(filesystem: Any) -> set[str]:
    names = filesystem.protocol
    return {names} if isinstance(names, str) else set(names)


def _exists(filesystem: Any, full: str) -> bool:
    filesystem.invalidate_cache()  # others may have written it since
    return bool(filesystem.exists(full))


def _remove_parts(filesystem: Any, root: str) -> None:
    for part in Path(root).glob(_PARTS) if isinstance(filesystem, LocalFileSystem) else ():
        with contextlib.suppress(OSError):  # another writer's, or gone meanwhile
            descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
                if is_ours and found.st_mtime < time.time() - _LEFT_S:
                    # Its writer has this lock for as long as it lives, whatever machine it is on.
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    part.unlink()
            finally:
                os.close(descriptor)


def _write_local(path: Path, data: bytes | bytearray | memoryview, is_new: bool) -> bool:
    """Through a file beside it, which takes its name only when it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(_PARTS.replace("*", f"{path.name}.{secrets.token_hex(4)}"))
    try:
        with part.open("xb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if is_new and not _linked(part, path):
                return False
            if not is_new:
                part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name too
    finally:
        os.close(folder)
    return True


def _linked(part: Path, path: Path) -> bool:
    """Give a file a name that no other one has; False if there is one."""
    try:
        path.hardlink_to(part)
    except FileExistsError:
        return False
    except OSError:  # a file system without links: seconds after it was looked for
        part.replace(path)
    return True
