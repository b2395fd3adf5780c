"""A folder to write to, at any fsspec URL: files are complete there or not there at all. Runs
anywhere; no torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from gpupool.data.stores.folder import Folder

_PARTS = ".gpupool-*.part"  # local files that are being written
_LEFT_S = 86_400.0  # a part that nobody has written to for so long was cut off
# A folder of theirs that is not there is a bucket, which nobody wants to be made for a typo.
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci"}


class Target(Folder):
    """A folder at a URL; made if it is not there, where there are folders. Any thread may use it.

    All methods raise DataError, or its CredentialsError, without any secret in it.
    """

    _counts_tries = False  # the parts of a large file are tried again each

    def put(self, path: str, data: bytes, *, is_new: bool = False) -> bool:
        """Write a file, in the place of an older one, so that it lasts through a power cut.

        With `is_new` an older one stays, and False is returned. An object store is asked for it
        before: of two writers at one moment the later one wins there.
        """

        def is_there(filesystem: Any, root: str) -> bool:
            filesystem.invalidate_cache()  # others may have written it since
            return bool(filesystem.exists(f"{root}/{path}"))

        def put_it(filesystem: Any, root: str) -> bool:
            full = f"{root}/{path}"
            if isinstance(filesystem, LocalFileSystem):
                return _write_local(Path(full), data, is_new)
            if not _is_bucket(filesystem):
                filesystem.makedirs(full.rpartition("/")[0], exist_ok=True)
            filesystem.pipe_file(full, bytes(data))
            return True

        if is_new and self.do(is_there, path):
            return False
        return self.do(put_it, path, "writing")

    def get(self, path: str) -> bytes:
        return self.do(lambda fs, root: bytes(fs.cat_file(f"{root}/{path}")), path)

    def end(self, path: str, num_bytes: int) -> bytes:
        start = -num_bytes
        return self.do(lambda fs, root: bytes(fs.cat_file(f"{root}/{path}", start=start)), path)

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

        return self.do(list_it)

    def remove(self, path: str) -> None:
        """Remove a file; nothing if it is gone."""

        def remove_it(filesystem: Any, root: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                filesystem.rm_file(f"{root}/{path}")

        self.do(remove_it, path, "removing")

    def check(self) -> None:
        """Write a small file, read it back and remove it, and what cut-off writers have left."""
        self.do(_prepare, doing="writing")
        probe = f"gpupool-probe-{secrets.token_hex(4)}"
        self.put(probe, b"probe")
        self.get(probe)
        self.remove(probe)


def _is_bucket(filesystem: Any) -> bool:
    names = filesystem.protocol
    return not _WITHOUT_FOLDERS.isdisjoint([names] if isinstance(names, str) else names)


def _prepare(filesystem: Any, root: str) -> None:
    if _is_bucket(filesystem):  # some stores make one for the first file that is put there
        with contextlib.suppress(PermissionError):  # the answer to a write says why
            filesystem.info(root.split("/")[0])
    for part in Path(root).glob(_PARTS) if isinstance(filesystem, LocalFileSystem) else ():
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if part.lstat().st_mtime < time.time() - _LEFT_S:
                part.unlink()


def _write_local(path: Path, data: bytes, is_new: bool) -> bool:
    """Through a file beside it, which takes its name only when it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(_PARTS.replace("*", f"{path.name}.{secrets.token_hex(4)}"))
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            try:
                path.hardlink_to(part)
            except FileExistsError:
                return False
            except OSError:  # a file system without links: moments after it was looked for
                part.replace(path)
        else:
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name too
    finally:
        os.close(folder)
    return True
