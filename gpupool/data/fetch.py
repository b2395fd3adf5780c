"""Lists and reads the files below one URL, through fsspec. Runs anywhere; no torch.

Every fault of a store becomes one sentence here, and only here: see `store_error`.
"""

from __future__ import annotations

import inspect
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import fsspec
import fsspec.asyn

from gpupool.core.errors import CredentialsError, DataError, DataNotFoundError

_SET_AWS_KEYS = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "then `%gpupool env AWS_*` sends them to every rank."
)
# What S3 answers to a wrong or expired key, as opposed to a good one that may not read this.
_BAD_KEY_CODES = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
}
_DENIED_CODES = {"AccessDenied", "AllAccessDisabled", "403"}
_NOT_FOUND_CODES = {"NoSuchBucket", "NoSuchKey", "404"}
# By name, because botocore is there only when s3fs is.
_NO_KEY_ERRORS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "SSOError",
    "TokenRetrievalError",
}
_UNREACHABLE_ERRORS = {"EndpointConnectionError", "ConnectTimeoutError"}
# Set when a key was refused: the user may have set another one by the next try.
_refused = threading.Event()
_RECONNECT_S = 10.0  # finding credentials may ask the machine's metadata service
_SECRET_NAME = re.compile(r"secret|token|passw|key|credential|sas|connection_string", re.IGNORECASE)


class FileInfo(NamedTuple):
    """One file: its path below the folder, its size in bytes, its ETag ("" where there is none)."""

    path: str
    size: int
    etag: str


class Listing(NamedTuple):
    """What lies below a folder: its files sorted by path, and the names of its sub-folders.

    Hidden files and folders (whose name starts with a dot) are left out.
    """

    files: list[FileInfo]
    folders: list[str]


@dataclass(frozen=True)
class Folder:
    """A folder at any fsspec URL: s3://, gs://, file paths, memory:// ...

    It holds the URL and the options, never a connection: each call asks fsspec for the file
    system, whose own cache makes that cheap. So it pickles, carries no credentials that the
    environment holds, and notices when `refresh_filesystems` has been called.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        url = os.fspath(self.url)
        if "://" not in url and "::" not in url:
            # An engine may have another working directory.
            url = os.path.abspath(os.path.expanduser(url))
        elif not url.endswith("://"):
            url = url.rstrip("/")
        object.__setattr__(self, "url", url)

    @property
    def shown_url(self) -> str:
        """The URL as it may be printed: without the password it may hold."""
        return re.sub(r"//[^/@]+@", "//***@", self.url)

    def name(self, path: str) -> str:
        """The printable URL of a file of this folder."""
        return f"{self.shown_url}/{path}" if path else self.shown_url

    def list_files(self) -> Listing:
        """All files below this folder, at any depth.

        Raises DataNotFoundError where there are none, CredentialsError or DataError otherwise.
        """
        with self._faults_named():
            filesystem, root = self._open()
            filesystem.invalidate_cache()
            found = filesystem.find(root, withdirs=True, detail=True)
        listing = _listing(root.rstrip("/"), found)
        if not listing.files:
            raise DataNotFoundError(_nothing_at(self.shown_url))
        return listing

    def read_many(self, paths: Sequence[str]) -> list[bytes]:
        """The contents of files of this folder, read at the same time, in the order of `paths`.

        Raises CredentialsError, DataNotFoundError or DataError naming the first that failed.
        """
        with self._faults_named():
            filesystem, root = self._open()
            full = [f"{root.rstrip('/')}/{path}" for path in paths]
            # `cat` takes "[1].jpg" for a pattern, and sorts; `cat_ranges` does neither.
            options = {"max_concurrency": 1} if _reads_in_parts(filesystem) else {}
            contents = filesystem.cat_ranges(full, None, None, on_error="return", **options)
        for path, content in zip(paths, contents, strict=True):
            if isinstance(content, Exception):
                raise self._fault(content, path) from None
        return list(contents)

    @contextmanager
    def _faults_named(self) -> Iterator[None]:
        try:
            yield
        except DataError:
            raise  # says it already
        except Exception as error:  # file systems raise whatever they like
            raise self._fault(error, "") from None

    def _open(self) -> tuple[Any, str]:
        """The file system and this folder's path on it."""
        if _refused.is_set():
            _refused.clear()
            refresh_filesystems()
        filesystem, root = fsspec.core.url_to_fs(self.url, **self.storage_options)
        return filesystem, root

    def _fault(self, error: BaseException, path: str) -> DataError:
        fault = store_error(error, self, path)
        if isinstance(fault, CredentialsError):
            _refused.set()
        return fault


def refresh_filesystems() -> None:
    """Make every fsspec file system of this process use the credentials that are now set.

    An s3fs instance keeps the keys that it found first, and fsspec hands the same instance out
    again. Instances that can connect anew do so in place, so that those a user holds work too;
    the others are forgotten, and the next use makes new ones. No object store is asked anything.

    May be called in any thread while others read: an instance changes in the thread of its event
    loop, between the steps of what runs there, and a read under way ends on its old connection.

    Raises CredentialsError if the new settings name credentials that are not there.
    """
    for kind in list(_subclasses(fsspec.AbstractFileSystem)):
        if not hasattr(kind, "set_session"):
            kind.clear_instance_cache()
            continue
        for token, filesystem in list(kind._cache.items()):
            if filesystem.asynchronous:  # in an event loop of the user's
                kind._cache.pop(token, None)
                continue
            with Folder("s3://")._faults_named():
                fsspec.asyn.sync(filesystem.loop, _reconnect, filesystem, timeout=_RECONNECT_S)


async def _reconnect(filesystem: Any) -> None:
    filesystem.invalidate_cache()
    await filesystem.set_session(refresh=True)


def store_error(error: BaseException, folder: Folder, path: str) -> DataError:
    """The one sentence for a fault of the store: what happened, where, what to do.

    Holds no value of a credential. `path` is the file below `folder`, "" for the folder itself.
    """
    name = folder.name(path)
    text = _without_secrets(str(error), folder.storage_options)
    chain = list(_chain(error))
    code = next((code for code in map(_s3_code, chain) if code), "")
    kinds = {base.__name__ for link in chain for base in type(link).__mro__}
    where = folder.shown_url  # a key is refused for all files alike: so all ranks say the same
    if kinds & _NO_KEY_ERRORS:
        return CredentialsError(f"{where}: no access key was found ({text}). {_SET_AWS_KEYS}")
    if code in _BAD_KEY_CODES:
        return CredentialsError(
            f"{where}: the store refused the access key ({code}). {_SET_AWS_KEYS}"
        )
    if code in _DENIED_CODES:
        return CredentialsError(
            f"{name}: this access key may not read here ({code}). "
            f"Allow it to list and read, or use another one. {_SET_AWS_KEYS}"
        )
    if code in _NOT_FOUND_CODES or isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return DataNotFoundError(f"{name} does not exist" if path else _nothing_at(name))
    if kinds & _UNREACHABLE_ERRORS or isinstance(error, ConnectionError):
        host = re.search(r"https?://[^/\"\s]+", str(error))
        where = f" at {host.group()}" if host else ""
        return DataError(
            f"{name}: the store{where} does not answer; "
            "check the network and, for s3, AWS_ENDPOINT_URL"
        )
    return DataError(f"{name}: {type(error).__name__}: {text}" if text else f"{name}: {error!r}")


def _nothing_at(name: str) -> str:
    return f"{name} does not exist or holds no files; check the URL"


def _listing(root: str, found: Mapping[str, Mapping[str, Any]]) -> Listing:
    files, folders = [], set()
    for full, info in found.items():
        path = full[len(root) :].strip("/")
        if not path and info["type"] == "file" and not full.endswith("/"):
            raise DataError(f"{full} is a file; give the folder that holds it")
        if not path or any(part.startswith(".") for part in path.split("/")):
            continue
        # An object whose key ends in "/" is how S3 consoles make an empty folder.
        is_folder = info["type"] == "directory" or full.endswith("/")
        if is_folder or "/" in path:
            folders.add(path.split("/")[0])
        if not is_folder:
            etag = str(info.get("ETag") or info.get("etag") or "").strip('"')
            files.append(FileInfo(path, int(info.get("size") or 0), etag))
    return Listing(sorted(files), sorted(folders))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and the errors it was raised from: s3fs keeps S3's own answer there."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _s3_code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _without_secrets(text: str, options: Mapping[str, Any]) -> str:
    for secret in _secrets(options):
        if len(secret) >= 6:  # shorter ones protect nothing, and replacing them garbles the text
            text = text.replace(secret, "***")
    return text


def _secrets(options: Mapping[str, Any]) -> Iterable[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif isinstance(value, str) and _SECRET_NAME.search(name):
            yield value
    for name, value in os.environ.items():
        if name.startswith("AWS_") and _SECRET_NAME.search(name):
            yield value


def _reads_in_parts(filesystem: Any) -> bool:
    """Whether it would read a file in parts, as s3fs does from 2026 on.

    It would ask for the size of every file first: a second round trip.
    """
    read = getattr(filesystem, "_cat_file", None)
    return read is not None and "max_concurrency" in inspect.signature(read).parameters


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)
