"""Values on their way to ranks on other hosts, and results from there. Runs on the client.

A rank on another host cannot open a file of the notebook's machine. So the file is copied into the
pool's private folder there, once for all ranks of the host: piece by piece, over the control
channel of the rank that is called. Results come back the same way.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

from gpupool.core.errors import EngineDiedError, PoolError
from gpupool.core.progress import BYTES, progress
from gpupool.core.wire.calls import Call
from gpupool.core.wire.pickles import MemoryFile, Packed, Part
from gpupool.core.wire.requests import Answer, AppendToFile, ControlRequest, ReadFile, RemoveFile
from gpupool.pool.engines.engines import Engines

PIECE_BYTES = 16 << 20
_NUM_AHEAD = 3  # pieces
_POLL_S = 0.1

Found = TypeVar("Found")


class Carrier:
    """Carries files between the notebook and ranks on other hosts. Any thread may call it."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        # The pool's folder on a host -> (device, inode) of a file -> its path here, and that of the
        # copy there. A host that was lost and is back has another folder, without the copies.
        self._copies: dict[str, dict[tuple[int, int], tuple[str, str]]] = {}
        self._numbers = itertools.count(1)  # of files

    def localized(self, rank: int, call: Call[Any], gives_up: Callable[[], bool]) -> Call[Any]:
        """The call with paths of the rank's host, where what it refers to is then.

        A PoolError says why not, a KeyboardInterrupt that the caller gives up.
        """
        if not self._engines.host_of(rank):
            return call
        changed: Call[Any] = with_paths(call, lambda path: self._copied(rank, path, gives_up))
        return changed

    def fetched(self, rank: int, file: MemoryFile, ask: Callable[[str], Packed]) -> Packed:
        """What `ask(out_path)` gives, which has a rank write to that file; it is in `file` then."""
        if not self._engines.host_of(rank):
            return ask(file.path)
        name = f"fetched-{next(self._numbers)}"
        packed = ask(name)
        if any(part.path for part in packed):
            with open(file.descriptor, "wb", closefd=False) as out:
                self._bring(rank, name, out)
        return [part._replace(path=part.path and file.path) for part in packed]

    def bring_file(self, rank: int, path: Path) -> Path:
        """`path`, in the pool's folder, with what a rank has put in the file of this name."""
        if self._engines.host_of(rank):
            with path.open("wb") as file:
                self._bring(rank, path.name, file)
        return path

    def _copied(self, rank: int, path: str, gives_up: Callable[[], bool]) -> str:
        """The path of the copy on the rank's host; it is made if there is none.

        Copies are removed whose files the notebook has no more: its own ranks had to open them
        before, and so have those of the host.
        """
        copies = self._copies.setdefault(self._engines.launch.folder_of(rank), {})
        with open(path, "rb", buffering=0) as file:  # kept while it is sent
            key = _key(file.fileno())
            if key not in copies:
                for known, (old, copy) in list(copies.items()):
                    if _key(old) != known and known in copies:
                        del copies[known]
                        self._engines.control(RemoveFile(copy), [rank])
                copies[key] = path, self._send(rank, file.fileno(), gives_up)
        return copies[key][1]

    def _send(self, rank: int, descriptor: int, gives_up: Callable[[], bool]) -> str:
        name, num_bytes = f"carried-{next(self._numbers)}", os.fstat(descriptor).st_size
        try:
            with progress(f"Sending to {self._engines.host_of(rank)}", num_bytes, BYTES) as bar:
                pieces = (
                    AppendToFile(name, os.pread(descriptor, PIECE_BYTES, start))
                    for start in range(0, num_bytes, PIECE_BYTES)
                )
                for there in self._ask(rank, pieces, gives_up):  # noqa: B007 - all are the same
                    bar.advance(PIECE_BYTES)
        except BaseException:
            self._engines.control(RemoveFile(name), [rank])
            raise
        return there

    def _bring(self, rank: int, name: str, file: IO[bytes]) -> None:
        try:
            with progress(f"Receiving from {self._engines.host_of(rank)}", unit=BYTES) as bar:
                starts = itertools.count(0, PIECE_BYTES)
                pieces = (ReadFile(name, start, PIECE_BYTES) for start in starts)
                for data in iter(self._ask(rank, pieces).__next__, b""):
                    file.write(data)
                    bar.advance(len(data))
        finally:
            self._engines.control(RemoveFile(name), [rank])

    def _ask(
        self,
        rank: int,
        requests: Iterable[ControlRequest[Found]],
        gives_up: Callable[[], bool] = lambda: False,
    ) -> Iterator[Found]:
        asked = deque[Future[Answer[Found]] | None]()
        for request in requests:
            asked.append(self._engines.control(request, [rank]).get(rank))
            if len(asked) == _NUM_AHEAD:
                yield self._found(rank, asked.popleft(), gives_up)
        for one in asked:
            yield self._found(rank, one, gives_up)

    def _found(
        self, rank: int, asked: Future[Answer[Found]] | None, gives_up: Callable[[], bool]
    ) -> Found:
        """The answer of a rank; None if it could not be asked."""
        while not gives_up():  # looked at for each piece, however fast they are answered
            if asked is None or wait([asked], _POLL_S).done:
                break
        else:
            raise KeyboardInterrupt("interrupted while values were sent")
        answer: Answer[Found] = Answer("died") if asked is None else asked.result()
        if answer.status == "died":
            loss = self._engines.losses.get(rank)
            raise loss.error() if loss else EngineDiedError(f"rank {rank} was restarted.")
        if answer.found is None:
            host = self._engines.host_of(rank)
            raise PoolError(f"the pool's folder on {host} (rank {rank}): {answer.error}")
        return answer.found


def with_paths(value: Any, change: Callable[[str], str]) -> Any:
    """A call, or what is in it, with `change(path)` for that of each part that is in a file."""
    if isinstance(value, Part):
        return value._replace(path=change(value.path)) if value.path else value
    if is_dataclass(value) and not isinstance(value, type):
        parts = {one.name: with_paths(getattr(value, one.name), change) for one in fields(value)}
        return replace(value, **parts)
    if type(value) in (list, tuple):
        return type(value)(with_paths(item, change) for item in value)
    if type(value) is dict:
        return {key: with_paths(item, change) for key, item in value.items()}
    return value


def _key(file: str | int) -> tuple[int, int]:
    """Device and inode, zeros without a file: another one may have its path later."""
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(file)
        return found.st_dev, found.st_ino
    return 0, 0
