"""Values on their way to ranks on other hosts, and results from there. Runs on the client.

A rank on another host cannot open a file of the notebook's machine. So the file is copied into the
pool's private folder there, once for all ranks of the host: piece by piece, over the control
channel of the rank that is called. Results come back the same way.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from gpupool.core.errors import EngineDiedError, PoolError
from gpupool.core.progress import BYTES, progress
from gpupool.core.wire.calls import Call
from gpupool.core.wire.pickles import MemoryFile, Packed, Part
from gpupool.core.wire.requests import Answer, ControlRequest, ReadFile, RemoveFiles, WriteFile
from gpupool.core.wire.values import Values
from gpupool.pool.engines.engines import Engines

PIECE_BYTES = 16 << 20
_NUM_AT_ONCE = 3  # pieces on their way
_POLL_S = 0.1

Found = TypeVar("Found")


@dataclass(eq=False)
class _Host:
    """What a host has: (device, inode) of a file -> its path here, and that of the copy there.

    Who makes a copy holds the lock.
    """

    copies: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def released(self) -> list[str]:
        """The names of copies that are forgotten, as the notebook has the file no more.

        Its own ranks had to open it before, and so have those of the host.
        """
        gone = [key for key, (path, _) in self.copies.items() if _key(path) != key]
        return [Path(self.copies.pop(key)[1]).name for key in gone]


class Carrier:
    """Carries files between the notebook and ranks on other hosts. Any thread may call it."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._hosts: dict[str, _Host] = {}  # by the pool's folder there
        self._numbers = itertools.count(1)  # of files
        engines.localized = self.localized

    def localized(self, rank: int, call: Call[Any], gives_up: Callable[[], bool]) -> Call[Any]:
        """The call with paths of the rank's host, where what it refers to is then.

        Raises:
            PoolError: it could not be brought there, or the rank has died.
            KeyboardInterrupt: the caller gives up.
        """
        copied = cache(lambda path: self._copied(rank, path, _names(call), gives_up))
        changed: Call[Any] = with_parts(call, lambda part: part._replace(path=copied(part.path)))
        return changed

    def fetched(
        self, rank: int, file: MemoryFile, what: str, ask: Callable[[str], Packed]
    ) -> Packed:
        """What `ask(out_path)` gives, which has a rank write to that file; it is in `file` then."""
        if not self._engines.host_of(rank):
            return ask(file.path)
        name = f"fetched-{next(self._numbers)}"
        packed = ask(name)
        if any(part.path for part in packed):
            self._bring(rank, name, file.descriptor, what)
        return [part._replace(path=part.path and file.path) for part in packed]

    def bring_file(self, rank: int, path: Path) -> Path:
        """`path`, in the pool's folder, with what a rank has put in the file of this name."""
        if self._engines.host_of(rank):
            with path.open("wb") as file:
                self._bring(rank, path.name, file.fileno(), "results")
        return path

    def _copied(self, rank: int, path: str, what: str, gives_up: Callable[[], bool]) -> str:
        """The path of the copy on the rank's host; it is made if there is none."""
        # By its folder: a host that was lost and is back has another one, without the copies.
        folder = self._engines.launch.folder_of(rank)
        host = self._hosts.setdefault(folder, _Host())
        _heed(gives_up)
        while not host.lock.acquire(timeout=_POLL_S):
            _heed(gives_up)
        try:
            with open(path, "rb", buffering=0) as file:  # kept while it is sent
                key = _key(file.fileno())
                if key not in host.copies:
                    if released := host.released():
                        self._engines.control(RemoveFiles(released), [rank])
                    host.copies[key] = path, self._send(rank, file.fileno(), what, gives_up)
            return host.copies[key][1]
        finally:
            host.lock.release()

    def _send(self, rank: int, descriptor: int, what: str, gives_up: Callable[[], bool]) -> str:
        name, num_bytes = f"carried-{next(self._numbers)}", os.fstat(descriptor).st_size
        pieces = (
            WriteFile(name, start, os.pread(descriptor, PIECE_BYTES, start))
            for start in range(0, num_bytes, PIECE_BYTES)
        )
        there, title = "", f"Sending {what} to {self._engines.host_of(rank)}"
        try:
            with progress(title, num_bytes, BYTES) as bar:
                for there in self._ask(rank, pieces, gives_up):  # noqa: B007 - the same each time
                    bar.advance(PIECE_BYTES)
        except BaseException:
            self._engines.control(RemoveFiles([name]), [rank])
            raise
        return there

    def _bring(self, rank: int, name: str, descriptor: int, what: str) -> None:
        """Move the file of this name on the rank's host to `descriptor`."""
        starts = itertools.count(0, PIECE_BYTES)
        pieces = self._ask(rank, (ReadFile(name, start, PIECE_BYTES) for start in starts))
        title = f"Receiving {what} from {self._engines.host_of(rank)}"
        try:
            with progress(title, unit=BYTES) as bar, open(descriptor, "wb", closefd=False) as file:
                for data in pieces:
                    file.write(data)
                    bar.advance(len(data))
                    if len(data) < PIECE_BYTES:
                        return
        finally:
            self._engines.control(RemoveFiles([name]), [rank])

    def _ask(
        self,
        rank: int,
        requests: Iterable[ControlRequest[Found]],
        gives_up: Callable[[], bool] = lambda: False,
    ) -> Iterator[Found]:
        """What a rank has found, in order; a few requests are on their way at once."""
        coming, asked = iter(requests), deque[Future[Answer[Found]]]()
        while True:
            for request in itertools.islice(coming, _NUM_AT_ONCE - len(asked)):
                sent = self._engines.control(request, [rank])
                asked.append(sent.get(rank) or _died())
            if not asked:
                return
            while not wait([asked[0]], _POLL_S).done:
                _heed(gives_up)
            match asked.popleft().result():
                case Answer("ok", found) if found is not None:
                    yield found
                case Answer("died"):
                    loss = self._engines.losses.get(rank)
                    raise loss.error() if loss else EngineDiedError(f"rank {rank} was restarted.")
                case Answer(error=why):
                    host = self._engines.host_of(rank)
                    raise PoolError(f"the pool's folder on {host} (rank {rank}): {why}")


def with_parts(value: Any, change: Callable[[Part], Part]) -> Any:
    """A call, or what is in it, with `change(part)` for each part that is in a file."""
    if isinstance(value, Part):
        return change(value) if value.path else value
    if is_dataclass(value) and not isinstance(value, type):
        parts = {one.name: with_parts(getattr(value, one.name), change) for one in fields(value)}
        return replace(value, **parts)
    if type(value) in (list, tuple):
        return type(value)(with_parts(item, change) for item in value)
    if type(value) is dict:
        return {key: with_parts(item, change) for key, item in value.items()}
    return value


def _names(call: Call[Any]) -> str:
    """What the notebook calls the values that a call brings, for a bar."""
    values = getattr(getattr(call, "bindings", call), "values", None)
    if not isinstance(values, Values):
        return "data"
    large = {number for number, packed in values.parcels if any(part.path for part in packed)}
    return ", ".join(name for name, number in values.numbers.items() if number in large) or "data"


def _key(file: str | int) -> tuple[int, int]:
    """Device and inode, zeros without a file: another one may have its path later."""
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(file)
        return found.st_dev, found.st_ino
    return 0, 0


def _heed(gives_up: Callable[[], bool]) -> None:
    if gives_up():
        raise KeyboardInterrupt("interrupted while values were sent")


def _died() -> Future[Answer[Any]]:
    answer: Future[Answer[Any]] = Future()
    answer.set_result(Answer("died"))
    return answer
