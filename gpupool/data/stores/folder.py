"""A folder of files at one URL, in any store, through fsspec. Runs anywhere.

    folder = Folder("s3://photos/train")
    for file in folder.list_files().files:
        data = folder.read(file.ref)

A `Folder` reads from the store; `Cached` (cache.py) is a source that reads through the disk.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from gpupool.core.errors import DataError, DataNotFoundError, SampleError
from gpupool.core.urls import refuse_typo, without_passwords
from gpupool.core.wire.environ import note_use
from gpupool.data.stores import faults, s3
from gpupool.data.stores.interface import (
    Content,
    FileInfo,
    FileRef,
    Listing,
    OnProgress,
    listing,
    version_of,
)
from gpupool.data.stores.local import find_local
from gpupool.data.stores.retry import counts
from gpupool.data.stores.waiting import interruptible

T = TypeVar("T")
# An ordinary bucket: no access point, no directory bucket, whose addresses follow other rules.
_PLAIN_S3 = re.compile(r"s3a?://[A-Za-z0-9][\w.-]+(?<!--x-s3)(/[^/?#][^?#]*)?")


@dataclass(frozen=True)
class Folder:
    """A folder at any fsspec URL: s3://, gs://, file paths, memory:// ... A `Source`.

    It is the URL and the options; connections are made when they are needed, renewed when AWS_*
    variables change, and not pickled. What may pass is tried again for some time, and counted in
    `retry.counts`.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    _counts_tries = True  # so neither s3fs nor botocore tries again behind our back

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

    @property
    def shown_url(self) -> str:
        """The URL as it may be printed: without the password or signature it may hold."""
        return without_passwords(self.url)

    @property
    def _is_s3(self) -> bool:
        return self.url.startswith(("s3://", "s3a://"))

    def name(self, path: str) -> str:
        """The printable URL of a file of this folder: what steers a terminal in it is escaped."""
        return faults.shown_name(self.url, path)

    def list_files(self, on_progress: OnProgress = lambda _: None) -> Listing:
        """All files below this folder, at any depth.

        `on_progress` is called now and then, in any thread, with how many there are so far.
        Raises DataNotFoundError where there are none, CredentialsError or DataError otherwise.
        """

        done: dict[str, s3.Found] = {}

        def quick(store: Any, prefix: str) -> Listing | None:
            files, folders = s3.find(store, prefix, on_progress, done)
            return listing(files, folders) if files else None

        def list_all(filesystem: Any, root: str) -> Listing:
            from fsspec.implementations.local import LocalFileSystem

            filesystem.invalidate_cache()
            if isinstance(filesystem, LocalFileSystem) and filesystem.isdir(root):
                return listing(*find_local(root))
            return self._list_all(filesystem, root)

        found = self.do(list_all, "", "listing", quick)
        if not found.files:
            name = self.shown_url
            raise DataNotFoundError(faults.nothing_at(name), "missing", url=name)
        on_progress(len(found.files))
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
        content = self.do(
            lambda filesystem, root: _get(filesystem, f"{root}/{path}", start, length),
            path,
            "reading",
            lambda store, prefix: s3.get(store, prefix + path, start, length),
        )
        counts.add(reads=1, bytes=len(content.data))
        self._check(file, content, start, length)
        return content.data

    def do(
        self,
        operation: Callable[[Any, str], T],
        path: str = "",
        doing: str = "reading",
        quick: Callable[[Any, str], T | None] | None = None,
    ) -> T:
        """What `operation` gives of a file system and the path of this folder there.

        What may pass is tried again; an interrupt ends it at once. `quick` does the same with
        obstore and a prefix: where it raises, or gives None, `operation` is asked.

        Raises DataError: one sentence, with `path` the file and `doing` what has failed.
        """

        def once() -> T:
            try:
                store, prefix = self._store() if quick is not None else (None, "")
                if quick is not None and store is not None:
                    answer = quick(store, prefix)
                    if answer is not None:
                        return answer
            except Exception as error:
                found = faults.trouble(error)
                if found.kind == "busy":
                    raise  # the store has said so itself
                if type(error).__name__ == "GenericError" and not found.what:  # of the network
                    is_silence = re.search("kind: timeout|timedout", str(error).lower())
                    what = "no answer" if is_silence else "connection broken"
                    counts.add(retries=1, reason=what)
            return self._call(operation)

        def ask() -> T:
            return faults.persisted(once, self.url, self.storage_options, path, doing)

        # fsspec can be interrupted, obstore cannot
        return interruptible(ask) if quick is not None and self._is_s3 else ask()

    def _store(self) -> tuple[Any, str]:
        """obstore's store, or None, and the prefix of this folder in it."""
        made_from, store, prefix = self.__dict__.get("_opened", (None, None, ""))
        if made_from != s3.state():
            made_from, store, prefix = s3.state(), None, ""
            if _PLAIN_S3.fullmatch(self.url):
                s3.refresh_if_changed()
                made_from = s3.state()
                filesystem, root = self._open()
                bucket, _, path = root.partition("/")
                store, prefix = s3.store(filesystem, bucket), f"{path}/" if path else ""
            self.__dict__["_opened"] = made_from, store, prefix  # frozen is what it is
        return store, prefix

    def _call(self, operation: Callable[[Any, str], T]) -> T:
        """The operation; with new credentials once more, should the store refuse those in use."""
        if "s3://" in self.url or "s3a://" in self.url:
            s3.refresh_if_changed()
        seen = s3.generation
        try:
            return operation(*self._open())
        except Exception as error:
            if not faults.trouble(error).is_refusal:
                raise
            s3.refresh_filesystems(seen)
        return operation(*self._open())

    def _open(self) -> tuple[Any, str]:
        """The file system, which fsspec's own cache holds, and the path of this folder in it."""
        import fsspec

        options = dict(self.storage_options)
        counts_tries = self._counts_tries and self._is_s3
        if counts_tries:
            config = {"retries": {"total_max_attempts": 1}, "max_pool_connections": 64}
            options["config_kwargs"] = config | dict(options.get("config_kwargs") or {})
        filesystem, root = fsspec.core.url_to_fs(self.url, **options)
        if counts_tries:
            filesystem.retries = 1
        return filesystem, root.rstrip("/")

    def _list_all(self, filesystem: Any, root: str) -> Listing:
        found = filesystem.find(root, withdirs=True, detail=True)
        files, folders = [], []
        for full, info in found.items():
            path = full[len(root) :].strip("/")
            # An object whose key ends in "/" is how S3 consoles make an empty folder.
            is_folder = info.get("type") == "directory" or full.endswith("/")
            if path and is_folder:
                folders.append(path.split("/")[0])
            elif path:
                etag = str(info.get("ETag") or info.get("etag") or "").strip('"')
                files.append(FileInfo(path, int(info.get("size") or 0), etag))
            elif not is_folder and len(found) == 1:  # http has the page itself in it
                what = f"{self.shown_url} is a file; give the folder that holds it"
                raise DataError(what, "file", url=self.shown_url)
        return listing(files, folders)

    def _check(self, file: FileRef, content: Content, start: int, length: int | None) -> None:
        """Raise SampleError if the file is empty, or another one than was listed.

        Where its size is known, `length` is within it.
        """
        data, size, etag = content
        expected = file.size if length is None else length
        how = ""
        if size == 0 or (size is None and not data and not start):
            name = self.name(file.path)
            raise SampleError(f"{name} is empty (0 bytes)", name, "empty")
        if file.size and size is not None and size != file.size:
            how = f"{file.size:,} bytes then, {size:,} now"
        elif file.size and len(data) != expected:
            how = f"not of {file.size:,} bytes any more"
        elif file.version and etag and version_of(etag) != file.version:
            how = f"its ETag is {etag} now"
        if how:
            raise faults.changed(self.name(file.path), how)


def _get(filesystem: Any, full: str, start: int, length: int | None) -> Content:
    options = {}
    if "max_concurrency" in _parameters(type(filesystem)):  # type: ignore[arg-type]  # a class is
        options["max_concurrency"] = 1  # in parts, s3fs would ask for the size first
    if length is None:
        data = filesystem.cat_file(full, **options)
        return Content(data[start:], len(data), "")
    data = filesystem.cat_file(full, start=start, end=start + length, **options)
    if len(data) > length:
        data = data[start : start + length]  # some HTTP servers know no ranges
    return Content(data, None, "")


@cache
def _parameters(kind: type[Any]) -> frozenset[str]:
    """What a file system's reading takes; to look takes as long as to read a small file."""
    return frozenset(inspect.signature(getattr(kind, "_cat_file", kind.cat_file)).parameters)
