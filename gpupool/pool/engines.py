"""The processes of one pool and the calls to them, from start to stop. Runs on the client.

What they are used for (cells, the process group, the environment) is the pool's business.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as wait_futures
from pathlib import Path
from typing import Any

from gpupool.core.errors import EngineDiedError, PoolError, PoolStartError
from gpupool.core.topology import Rank
from gpupool.pool.client import EngineClient, OnMessage
from gpupool.pool.launch import Launch, exit_reason

_CALL_ALL_TIMEOUT_S = 60.0

Progress = Callable[[str], None]


class Engines:
    """One engine per rank, each at once known to have died if it has.

    `on_loss(sentence, log_tail)` is called, from a background thread, when a process is gone.
    """

    def __init__(self, ranks: Sequence[Rank], on_loss: Callable[[str, str], None]) -> None:
        self.last_used = time.monotonic()
        self._ranks = ranks
        self._on_loss = on_loss
        self._lock = threading.RLock()
        self._stopped = False
        self._losses: list[tuple[str, str]] = []
        self._dead: dict[int, str] = {}
        self._open: dict[int, set[Future[Any]]] = {rank.rank: set() for rank in ranks}
        self._num_files = 0
        self._client: EngineClient | None = None
        self._launch = Launch(self._on_exit)

    def start(self, timeout_s: float, progress: Progress) -> None:
        """Start the processes and connect to them.

        Raises:
            PoolStartError: one ended, or they were not all there in time. `stop` has to follow.
        """
        size = len(self._ranks)
        deadline = time.monotonic() + timeout_s
        self._launch.start_controller()
        self._launch.start_engines(self._ranks)
        progress(f"starting {size} engines")
        while not self._launch.is_controller_up():
            self._check_start(deadline, timeout_s, "the controller")
            time.sleep(0.02)
        try:
            left_s = max(1.0, deadline - time.monotonic())
            self._client = EngineClient(self._launch.client_file, left_s)
        except TimeoutError:
            self._check_start(0.0, timeout_s, "the connection to the controller")
            raise
        ready = -1
        while ready < size:
            if len(self._client.ranks) > ready:
                ready = len(self._client.ranks)
                progress(f"{ready} of {size} engines ready")
            self._check_start(deadline, timeout_s, f"{size - ready} of the engines")
            time.sleep(0.02)

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process id of its engine; 0 before it was started."""
        return {r.rank: self._launch.pids.get(f"rank {r.rank}", 0) for r in self._ranks}

    def alive_ranks(self) -> list[int]:
        """The ranks whose engines have not died."""
        return [r.rank for r in self._ranks if r.rank not in self._dead]

    def busy_ranks(self) -> list[int]:
        """The ranks that have a call to answer."""
        with self._lock:
            return [rank for rank, futures in self._open.items() if futures]

    def call(
        self, rank: int, name: str, payload: dict[str, Any], on_message: OnMessage | None = None
    ) -> Future[Any]:
        """Call an engine function on one rank. Fails at once should the engine die meanwhile."""
        with self._lock:
            if rank in self._dead:
                failed: Future[Any] = Future()
                failed.set_exception(EngineDiedError(self._dead[rank]))
                return failed
            assert self._client is not None
            self._client.trim()
            future = self._client.call(rank, name, payload, on_message)
            self._open[rank].add(future)
        future.add_done_callback(lambda f: self._closed(rank, f))
        return future

    def call_all(self, name: str, payload: dict[str, Any]) -> dict[int, Any]:
        """Call an engine function on every rank and wait; for calls that take a moment."""
        futures = {r.rank: self.call(r.rank, name, payload) for r in self._ranks}
        _, late = wait_futures(futures.values(), timeout=_CALL_ALL_TIMEOUT_S)
        if late:
            ranks = ", ".join(str(r) for r, f in futures.items() if f in late)
            raise PoolError(
                f"rank {ranks} did not answer {name} within {_CALL_ALL_TIMEOUT_S:.0f} s."
            )
        return {rank: future.result() for rank, future in futures.items()}

    def signal(self, ranks: Iterable[int]) -> None:
        """Send SIGINT to these ranks' engines; one that is idle ignores it."""
        for rank in ranks:
            self._launch.signal(rank)

    def control(
        self,
        request: str,
        content: dict[str, Any] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> dict[int, Future[dict[str, Any]]]:
        """Send a control request to every rank (or these), busy or not: rank -> its answer."""
        assert self._client is not None
        chosen = [r for r in self.alive_ranks() if ranks is None or r in ranks]
        return {rank: self._client.control(rank, request, content) for rank in chosen}

    def new_file(self, name: str) -> Path:
        """A new path in the private folder, which every rank of this host can read."""
        with self._lock:
            self._num_files += 1
            return self._launch.folder / f"{self._num_files}-{name}"

    def log(self, rank: int) -> str:
        """The log of a rank's engine so far."""
        return self._launch.log_path(f"rank {rank}").read_text(errors="replace")

    def stop(self) -> None:
        """End every process and remove the folder."""
        self._stopped = True  # from now on an end is no loss
        if self._client is not None:
            self._client.close()
        self._launch.stop()
        self._fail(self._open, "the pool was stopped")

    def _check_start(self, deadline: float, timeout_s: float, missing: str) -> None:
        if self._losses:
            sentence, log_tail = self._losses[0]
            raise PoolStartError(with_log(f"{sentence} Nothing was left running.", log_tail))
        if time.monotonic() > deadline:
            raise PoolStartError(
                f"{missing} did not come up within {timeout_s:g} s; nothing was left running. "
                "A larger timeout_s (--timeout) gives a slow machine more time."
            )

    def _closed(self, rank: int, future: Future[Any]) -> None:
        with self._lock:
            self._open[rank].discard(future)
            self.last_used = time.monotonic()

    def _on_exit(self, name: str, status: int, log_tail: str) -> None:
        """A process of ours has ended; called from the agent's reader thread."""
        if self._stopped:
            return
        if name.startswith("rank "):
            sentence = f"{name} {exit_reason(status)}; its variables are lost."
            lost = [int(name.removeprefix("rank "))]
        else:
            sentence = f"the {name} of the pool {exit_reason(status)}; its ranks are out of reach."
            lost = self.alive_ranks()
        message = with_log(sentence, log_tail)
        with self._lock:
            self._losses.append((sentence, log_tail))
            for rank in lost:
                self._dead[rank] = message
        self._on_loss(sentence, log_tail)
        self._fail({rank: self._open[rank] for rank in lost}, message)

    def _fail(self, open_calls: Mapping[int, set[Future[Any]]], message: str) -> None:
        with self._lock:
            lost = [future for futures in open_calls.values() for future in futures]
        for future in lost:
            with contextlib.suppress(InvalidStateError):  # its answer has come after all
                future.set_exception(EngineDiedError(message))


def with_log(sentence: str, log_tail: str) -> str:
    """A sentence about a process, with the end of its log, if there is one, below."""
    return f"{sentence}\nThe end of its log:\n{log_tail}" if log_tail else sentence
