"""A folder of files at one URL, in any store, through fsspec. Runs anywhere."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import xxhash

from gpupool.core.errors import DataError, SampleError
from gpupool.core.progress import progress
from gpupool.core.terminal import without_controls
from gpupool.core.urls import refuse_typo, without_passwords
from gpupool.core.wire.environ import note_use
from gpupool.data.stores import faults, s3
from gpupool.data.stores.retry import Tries, counts
from gpupool.data.stores.threads import interruptible

T = TypeVar("T")
Quick = Callable[[Any, str], T | None]  # an operation by obstore: of its store and a prefix
# An ordinary bucket: no access point, no directory bucket, whose addresses follow other rules.
_PLAIN_S3 = re.compile(r"s3a?://[A-Za-z0-9][\w.-]+(?<!--x-s3)(/[^/?#][^?#]*)?")
_served: set[str] = set()  # the buckets and hosts that this process has had something from


class FileRef(NamedTuple):
    """A file of a source: path below it, size in bytes, 32 bits of its ETag; 0 where not known."""

    path: str
    size: int = 0
    version: int = 0


class Source(Protocol):
    """Files that can be read by many threads at once, as those of a `Folder`; pickles without
    connections. `shown_url` is where they lie, as it may be printed.
    """

    @property
    def shown_url(self) -> str: ...

    def name(self, path: str) -> str: ...

    def read(self, file: FileRef, start: int = 0, length: int | None = None) -> bytes: ...


@dataclass(frozen=True)
class Folder:
    """A folder at any fsspec URL, or a path. A `Source`.

    Connections are made when they are needed, and renewed when AWS_* variables change. What may
    pass is tried again, and counted.
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
        return without_passwords(self.url)

    def name(self, path: str) -> str:
        return faults.shown_name(self.url, path)

    def list_files(self) -> list[FileRef]:
        """All files below this folder, at any depth, sorted by path, but for hidden ones.

        Raises DataNotFoundError where there are none, CredentialsError or DataError otherwise.
        """
        done: dict[str, list[s3.Entry]] = {}
        with progress("Listing", unit="files") as bar:
            found = self.do(
                self._list_all,
                doing="listing",
                quick=lambda store, below: visible(s3.find(store, below, bar.update, done)) or None,
            )
            bar.update(len(found))
        note_use(self.url)
        return found

    def read(self, file: FileRef, start: int = 0, length: int | None = None) -> bytes:
        """A whole file, or `length` bytes of it from `start`, fewer at its end.

        Raises SampleError naming the file if it is missing, empty, or other than `file` says;
        CredentialsError, and DataError when the store keeps failing.
        """
        path, listed, version = file
        if listed and (start or length is not None):
            left = max(0, listed - start)
            length = left if length is None else min(length, left)
        if length == 0:
            return b""
        data, size, etag = self.do(
            lambda filesystem, root: _get(filesystem, f"{root}/{path}", start, length),
            path,
            quick=lambda store, prefix: s3.get(store, prefix + path, start, length),
        )
        counts.add(reads=1)
        if not data and not start:
            name = self.name(path)
            raise SampleError(f"{name} is empty (0 bytes)", name, "empty")
        is_other = version and etag and version_of(etag) != version
        if is_other or (listed and (size or listed, len(data)) != (listed, length or listed)):
            raise faults.changed(self.name(path))
        return data

    def do(
        self,
        operation: Callable[[Any, str], T],
        path: str = "",
        doing: str = "reading",
        quick: Quick[T] | None = None,
    ) -> T:
        """What `operation` gives of a file system and the path of this folder there.

        An interrupt ends it at once. `quick` does the same with obstore: where it raises, or gives
        None, `operation` is asked. Raises DataError: one sentence, with `path` the file and `doing`
        what has failed.
        """
        address = "/".join(self.url.split("/")[:3])
        fast = quick if _PLAIN_S3.fullmatch(self.url) else None

        def persist() -> T:
            with Tries(doing) as tries:
                while True:
                    try:
                        answer = self._quickly(fast) if fast is not None else None
                        answer = self._call(operation) if answer is None else answer
                        _served.add(address)
                        return answer
                    except DataError:
                        raise  # says it already
                    except Exception as error:  # file systems raise whatever they like
                        passing = faults.passing(error, address in _served)
                        if passing is None or not tries.again(*passing):
                            where = self.url, self.storage_options, path
                            raise faults.sentence(error, *where, tries) from None

        return interruptible(persist) if fast else persist()  # fsspec can be interrupted

    def _quickly(self, quick: Quick[T]) -> T | None:
        """What it gives; None where s3fs is to be asked, also for its error."""
        try:
            made_from, store, prefix = self.__dict__.get("_opened", (None, None, ""))
            if made_from != (now := s3.generation()):
                filesystem, root = self._open()
                bucket, _, path = root.partition("/")
                store, prefix = s3.store(filesystem, bucket), f"{path}/" if path else ""
                self.__dict__["_opened"] = now, store, prefix  # frozen is what it is
            return None if store is None else quick(store, prefix)
        except Exception as error:
            kind, what = faults.trouble(error)
            if kind == "busy":
                raise  # the store has said so itself
            if kind == "network":
                counts.add(what, retries=1)
        return None

    def _call(self, operation: Callable[[Any, str], T]) -> T:
        """The operation; with new credentials once more, should the store refuse those in use."""
        seen = s3.generation() if re.search("s3a?://", self.url) else None  # also in zip://::s3://
        try:
            return operation(*self._open())
        except Exception as error:
            if seen is None or faults.trouble(error)[0] not in ("expired", "refused", "denied"):
                raise
            s3.refresh_filesystems(seen)
        return operation(*self._open())

    def _open(self) -> tuple[Any, str]:
        """The file system, which fsspec's own cache holds, and the path of this folder in it."""
        import fsspec

        options = dict(self.storage_options)
        counts_tries = self._counts_tries and self.url.startswith(("s3://", "s3a://"))
        if counts_tries:
            config = {"retries": {"total_max_attempts": 1}, "max_pool_connections": 64}
            options["config_kwargs"] = config | dict(options.get("config_kwargs") or {})
        filesystem, root = fsspec.core.url_to_fs(self.url, **options)
        if counts_tries:
            filesystem.retries = 1
            filesystem.max_concurrency = 1  # to read by parts, it would ask for the size first
        return filesystem, root.rstrip("/")

    def _list_all(self, filesystem: Any, root: str) -> list[FileRef]:
        from fsspec.implementations.local import LocalFileSystem

        filesystem.invalidate_cache()
        if isinstance(filesystem, LocalFileSystem) and filesystem.isdir(root):
            listed = list(_files_on_disk(root))
        else:
            listed = []
            for full, info in filesystem.find(root, detail=True).items():
                path, size = full[len(root) :].strip("/"), int(info.get("size") or 0)
                etag = str(info.get("ETag") or info.get("etag") or "").strip('"')
                # An object whose key ends in "/" is how S3 consoles make an empty folder.
                if path and not full.endswith("/"):
                    listed.append((path, size, etag))
        if found := visible(listed):
            return found
        if filesystem.isfile(root):
            what = f"{self.shown_url} is a file; give the folder that holds it"
            raise DataError(what, "file", url=self.shown_url)
        raise FileNotFoundError


def version_of(etag: str) -> int:
    """32 bits that change when the ETag does; 0 for none, and never for one."""
    return (xxhash.xxh32_intdigest(etag.encode()) or 1) if etag else 0


def visible(listed: Iterable[tuple[str, int, str]]) -> list[FileRef]:
    """The files of a listing (path, size, ETag), sorted by path: without hidden ones, below any
    name that starts with a dot, and what marks a folder: it is empty, and has no extension.
    """

    def is_seen(file: FileRef) -> bool:
        is_hidden = file.path.startswith(".") or "/." in file.path
        return not is_hidden and (file.size > 0 or "." in file.path.rpartition("/")[2])

    files = (FileRef(path, size, version_of(etag)) for path, size, etag in listed)
    return sorted(filter(is_seen, files))


def _files_on_disk(
    root: str, path: str = "", above: tuple[os.stat_result, ...] = ()
) -> Iterator[tuple[str, int, str]]:
    """All files below a folder and those that links lead to, which fsspec does not enter.

    A link back to a folder that it lies in (one of `above`) is not entered again. Raises DataError
    for what can be neither read nor entered, about which fsspec says nothing.
    """
    full = os.path.join(root, path)
    try:
        status = os.stat(full)
        if stat.S_ISREG(status.st_mode):
            yield path, status.st_size, ""
            return
        is_known = any(os.path.samestat(status, one) for one in above)
        names = [] if is_known else os.listdir(full)
    except OSError as error:
        if os.path.lexists(full):  # else it was there a moment ago
            shown = without_controls(full)
            what = f"{shown} cannot be listed ({error.strerror}); make it readable, or remove it"
            raise DataError(what, "unreadable", url=shown) from None
        return
    for name in names:
        if not name.startswith("."):
            yield from _files_on_disk(root, os.path.join(path, name), (*above, status))


def _get(filesystem: Any, full: str, start: int, length: int | None) -> tuple[bytes, int, str]:
    """The bytes of a file; the size of the whole, 0 where that is not known; no ETag."""
    if length is None:
        data = filesystem.cat_file(full)
        return data[start:], len(data), ""
    data = filesystem.cat_file(full, start=start, end=start + length)
    # some HTTP servers know no ranges
    return data[start : start + length] if len(data) > length else data, 0, ""
