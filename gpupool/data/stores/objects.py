"""Lists and reads the objects below one S3 URL, by obstore. Runs anywhere; no torch.

Keys are looked at by pages of 1,000, each of which takes the store tens of milliseconds. Where the
first page shows that there are folders, these are listed at the same time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from gpupool.core.errors import DataError
from gpupool.data.stores import s3
from gpupool.data.stores.error_kinds import CutShortError, persisted, trouble
from gpupool.data.stores.interface import Content, FileInfo, Listing, OnProgress, Store, listing
from gpupool.data.stores.retry import try_until
from gpupool.data.stores.s3_options import is_plain
from gpupool.data.stores.threads import start_threads
from gpupool.data.stores.waiting import interruptible

_AT_ONCE = 16
_PAGE = 1000
_REPORT_EVERY_S = 0.2
Entry = dict[str, Any]  # obstore's ObjectMeta: "path", "size", "e_tag"
T = TypeVar("T")


class Objects:
    """The objects below `prefix` of a bucket. A `Store`; any thread may call it.

    `others` reads the same place where keys have no form of a path ("a//b"), which obstore cannot
    name; `page` is how many keys the first look at a folder takes.
    """

    def __init__(self, bucket: s3.Bucket, prefix: str, others: Store, page: int = _PAGE) -> None:
        self._bucket = bucket
        self._others = others
        self._page = page
        self._root = f"{prefix}/" if prefix else ""

    @property
    def expires_at(self) -> float | None:
        """When the keys in use end, in seconds since 1970, if that is known."""
        return self._bucket.expires_at

    def get(self, path: str, start: int, length: int | None) -> Content:
        """See `Store.get`."""
        if not is_plain(path):
            return self._others.get(path, start, length)
        options = _range(start, length)

        def get_it(store: Any) -> Content:
            result = store.get(self._root + path, options=options)
            meta, (begin, end) = result.meta, result.range
            data = bytes(result.bytes())
            if len(data) != end - begin:
                raise CutShortError(len(data), end - begin)
            return Content(data, meta["size"], _etag(meta))

        return self._call(get_it)

    def list_files(self, on_progress: OnProgress) -> Listing:
        """See `Store.list_files`."""
        from obstore.exceptions import InvalidPathError

        try:
            entries = self._list_all(on_progress)
        except InvalidPathError:
            return self._others.list_files(on_progress)
        if not entries:
            self._check_no_file()
        return self._listing(entries)

    def _list_all(self, on_progress: OnProgress) -> list[Entry]:
        """All objects, in no order, from many prefixes at once.

        Its threads are daemons: neither an interrupt nor the end of the process waits for a store
        that does not answer.
        """
        entries: list[Entry] = []
        pages: list[int] = []  # sizes; more than are in `entries`, as these come by prefixes
        prefixes: SimpleQueue[str | None] = SimpleQueue()
        answers: SimpleQueue[tuple[list[Entry], Sequence[str]] | BaseException] = SimpleQueue()
        left = 1  # prefixes that have not been answered; 0 ends it

        def work() -> None:
            try_until(lambda: not left)
            while (prefix := prefixes.get()) is not None:
                if left:
                    answers.put(self._list_below(prefix, pages.append))

        start_threads("gpupool-list", [work] * _AT_ONCE)
        prefixes.put(self._root)
        try:
            while left:
                try:
                    answer = answers.get(timeout=_REPORT_EVERY_S)
                except Empty:
                    pass
                else:
                    if isinstance(answer, BaseException):
                        raise answer
                    entries += answer[0]
                    left += len(answer[1]) - 1
                    for prefix in answer[1]:
                        prefixes.put(prefix)
                on_progress(sum(pages))
        finally:
            left = 0
            for _ in range(_AT_ONCE):
                prefixes.put(None)
        return entries

    def _list_below(
        self, prefix: str, found: OnProgress
    ) -> tuple[list[Entry], Sequence[str]] | BaseException:
        try:
            return self._call(
                lambda store: _list_below(store, prefix, self._page, found), "listing"
            )
        except BaseException as error:  # raised in the thread that lists
            return error

    def _listing(self, entries: Sequence[Entry]) -> Listing:
        skip = len(self._root)
        marks = self._folder_marks(entries)
        files = [
            FileInfo(entry["path"][skip:], entry["size"], _etag(entry))
            for entry in entries
            if len(entry["path"]) > skip and entry["path"] not in marks
        ]
        return listing(files, [path[skip:].split("/")[0] for path in marks if len(path) > skip])

    def _folder_marks(self, entries: Sequence[Entry]) -> set[str]:
        """Which of the entries are no files: an empty object whose key ends in "/" marks a folder.

        obstore leaves the "/" out, so these and empty files without an extension look the same.
        """
        suspects = {entry["path"] for entry in entries if not entry["size"]}
        suspects = {path for path in suspects if "." not in path.rsplit("/", 1)[-1]}
        if not suspects:
            return suspects
        found = suspects & {self._root.rstrip("/"), *_folders(entry["path"] for entry in entries)}
        for above in {path.rpartition("/")[0] for path in suspects - found}:
            below = self._call(operator.methodcaller("list_with_delimiter", above or None))
            found |= suspects & {prefix.rstrip("/") for prefix in below["common_prefixes"]}
        return found

    def _check_no_file(self) -> None:
        if not self._root:
            return
        try:
            self._call(lambda store: store.head(self._root.rstrip("/")))
        except FileNotFoundError:
            return
        url = f"s3://{self._bucket.name}/{self._root.rstrip('/')}"
        raise DataError(f"{url} is a file; give the folder that holds it", "file", url=url)

    def _call(self, operation: Callable[[Any], T], doing: str = "reading") -> T:
        """What `operation` gives; what may pass is tried again. An interrupt ends it at once."""
        bucket = self._bucket
        return interruptible(
            lambda: persisted(lambda: self._call_once(operation), lambda: bucket.address, doing)
        )

    def _call_once(self, operation: Callable[[Any], T]) -> T:
        """With new settings once more, should the store refuse those in use."""
        connection = self._bucket.connection()
        try:
            return operation(connection.store)
        except Exception as error:
            keys = connection.keys
            if keys is not None and keys.failure is not None:
                raise keys.failure from None
            found = trouble(error)
            if not (found.is_refusal or found.region):
                raise
            connection = self._bucket.renew(connection, found.region)
        return operation(connection.store)


def _folders(paths: Iterable[str]) -> set[str]:
    """Every folder that a path lies in."""
    found: set[str] = set()
    for path in paths:
        above = path.rpartition("/")[0]
        while above and above not in found:
            found.add(above)
            above = above.rpartition("/")[0]
    return found


def _list_below(
    store: Any, prefix: str, page: int, found: OnProgress
) -> tuple[list[Entry], Sequence[str]]:
    """What lies below a prefix, and the prefixes below it that are still to be listed."""
    pages = store.list(prefix or None, chunk_size=page)
    entries = list(next(pages, []))
    if len(entries) == page and any("/" in entry["path"][len(prefix) :] for entry in entries):
        below = store.list_with_delimiter(prefix or None)
        found(len(below["objects"]))
        return list(below["objects"]), [f"{one.rstrip('/')}/" for one in below["common_prefixes"]]
    found(len(entries))
    for more in pages:
        entries += more
        found(len(more))
    return entries, ()


def _range(start: int, length: int | None) -> dict[str, Any]:
    if length is not None:
        return {"range": (start, start + length)}
    return {"range": {"offset": start}} if start else {}


def _etag(meta: Entry) -> str:
    return (meta["e_tag"] or "").strip('"')
