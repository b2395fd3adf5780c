"""Lists and reads files through fsspec, of any protocol. Runs anywhere; no torch."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import fsspec
import fsspec.asyn
from fsspec.implementations.local import LocalFileSystem

from gpupool.core.errors import DataError
from gpupool.core.urls import without_passwords
from gpupool.data.stores import s3, store_errors
from gpupool.data.stores.error_kinds import persisted, trouble
from gpupool.data.stores.interface import Content, FileInfo, Listing, OnProgress, listing
from gpupool.data.stores.local import find_local

_RECONNECT_S = 10.0  # finding credentials may ask the machine's metadata service
_refresh_lock = threading.Lock()
_generation = 0
_environment: tuple[object, ...] | None = None  # what the file systems were last made from
T = TypeVar("T")


class Files:
    """The files below a URL of any protocol that fsspec knows. A `Store`; any thread may call it.

    It holds no file system: fsspec's own cache has it, and `refresh_filesystems` renews it there.
    """

    expires_at: float | None = None

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self._url = url
        self._storage_options = storage_options
        self._uses_aws = "s3://" in url or "s3a://" in url

    def get(self, path: str, start: int, length: int | None) -> Content:
        """See `Store.get`."""
        end = None if length is None else start + length

        def get_it(filesystem: Any, root: str) -> Content:
            options = {"max_concurrency": 1} if _reads_in_parts(filesystem) else {}
            full = f"{root}/{path}"
            if end is None:
                data = filesystem.cat_file(full, **options)
                return Content(data[start:], len(data), "")
            data = filesystem.cat_file(full, start=start, end=end, **options)
            if len(data) > end - start:
                data = data[start:end]  # some HTTP servers know no ranges, and send everything
            return Content(data, None, "")

        return self.persisted(get_it)

    def list_files(self, on_progress: OnProgress) -> Listing:
        """See `Store.list_files`."""

        def list_it(filesystem: Any, root: str) -> Listing:
            filesystem.invalidate_cache()
            if isinstance(filesystem, LocalFileSystem) and filesystem.isdir(root):
                return listing(*find_local(root))
            return _listing(root, filesystem.find(root, withdirs=True, detail=True))

        found = self.persisted(list_it, "listing")
        on_progress(len(found.files))
        return found

    def persisted(self, operation: Callable[[Any, str], T], doing: str = "reading") -> T:
        """What `operation` gives of a file system and the path there; see `trouble.persisted`."""
        return persisted(lambda: self.call(operation), self._address, doing)

    def _address(self) -> str:
        """Which store is meant: the URL as far as a bucket or host, and where variables put it."""
        options = self._storage_options.get("client_kwargs") or self._storage_options
        endpoint = options.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL")
        return f"{endpoint} {'/'.join(self._url.split('/')[:3])}"

    def call(self, operation: Callable[[Any, str], T]) -> T:
        """The operation; with new credentials once more, should the store refuse those in use."""
        if self._uses_aws:
            _refresh_if_changed()
        seen = _generation
        try:
            return operation(*self._open())
        except Exception as error:
            if not trouble(error).is_refusal:
                raise
            _refresh(seen)
        return operation(*self._open())

    def _open(self) -> tuple[Any, str]:
        filesystem, root = fsspec.core.url_to_fs(self._url, **self._storage_options)
        return filesystem, root.rstrip("/")


def refresh_filesystems() -> None:
    """Make every file system of this process use the credentials that are now set.

    An s3fs instance keeps the keys that it found first, and fsspec hands the same instance out
    again. Instances that can reconnect do so in place, so that those a user holds work too;
    the others are forgotten, and the next use makes new ones. So do the connections that
    datastores hold. No object store is asked anything.

    May be called in any thread while others read: an instance changes in the thread of its event
    loop, between the steps of what runs there, and a read under way ends on its old connection.

    Raises CredentialsError, at the end, if the new settings name credentials that are not there.
    """
    _refresh(_generation)


def _refresh(seen: int) -> None:
    """Refresh, unless another thread has done so since `seen` was the generation."""
    global _generation, _environment
    with _refresh_lock, store_errors.named("s3://"):
        if seen != _generation:
            return
        _generation += 1
        _environment = s3.environment()
        failed: list[Exception] = []
        for kind in list(_subclasses(fsspec.AbstractFileSystem)):
            if not _connects_anew(kind):
                kind.clear_instance_cache()
                continue
            for token, filesystem in list(kind._cache.items()):
                if filesystem.asynchronous:  # in an event loop of the user's
                    kind._cache.pop(token, None)
                    continue
                try:
                    fsspec.asyn.sync(filesystem.loop, _reconnect, filesystem, timeout=_RECONNECT_S)
                except Exception as error:  # raised once the others have theirs
                    failed.append(error)
        s3.forget_connections()
        if failed:
            raise failed[0]


def _renew_lock() -> None:
    """A forked child must not wait for a thread that only its parent has."""
    global _refresh_lock
    _refresh_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _refresh_if_changed() -> None:
    """Also at the first use: the user may have made file systems before, with other settings."""
    if _environment != s3.environment():
        _refresh(_generation)


async def _reconnect(filesystem: Any) -> None:
    filesystem.invalidate_cache()
    try:
        await filesystem.set_session(refresh=True)
    except Exception:
        if getattr(filesystem, "_s3", filesystem) is not None:
            raise
        # It never has connected: made with a misspelt profile, say. Nobody else needs to know.


def _listing(root: str, found: Mapping[str, Mapping[str, Any]]) -> Listing:
    files, folders = [], set()
    for full, info in found.items():
        path = full[len(root) :].strip("/")
        # An object whose key ends in "/" is how S3 consoles make an empty folder.
        is_folder = info.get("type") == "directory" or full.endswith("/")
        if not path and not is_folder and len(found) == 1:  # http has the page itself in it
            shown = without_passwords(full)
            raise DataError(f"{shown} is a file; give the folder that holds it", "file", url=shown)
        if path and not is_folder:
            etag = str(info.get("ETag") or info.get("etag") or "").strip('"')
            files.append(FileInfo(path, int(info.get("size") or 0), etag))
        elif path and is_folder:
            folders.add(path.split("/")[0])
    return listing(files, folders)


def _connects_anew(kind: type[Any]) -> bool:
    """Whether instances can take new credentials, as those of s3fs; http's have sessions too."""
    return _takes(getattr(kind, "set_session", None), "refresh")


def _reads_in_parts(filesystem: Any) -> bool:
    """Whether it would read a file in parts, as s3fs does from 2026 on.

    It would ask for the size of every file first: a second round trip.
    """
    return _takes(getattr(filesystem, "_cat_file", None), "max_concurrency")


def _takes(function: Callable[..., Any] | None, name: str) -> bool:
    return function is not None and name in inspect.signature(function).parameters


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)
