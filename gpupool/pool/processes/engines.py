"""The processes of one pool and the calls to them, from start to stop. Runs on the client.

What they are used for (cells, the process group, the environment) is the pool's business.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError
from concurrent.futures import wait as wait_futures
from functools import cached_property
from pathlib import Path
from typing import Any

from gpupool.core.errors import EngineDiedError, PoolError, PoolStartError, UnansweredError
from gpupool.core.formatting import rank_count
from gpupool.core.machine.nvml import wait_until_released
from gpupool.core.machine.topology import Rank
from gpupool.core.wire.agent import FORK_SERVER, process_of, rank_of
from gpupool.core.wire.calls import Call
from gpupool.core.wire.output import OnMessage
from gpupool.core.wire.replies import Reply, Value
from gpupool.core.wire.requests import Answer, ControlRequest, Found, Interrupt
from gpupool.pool.notices import Progress
from gpupool.pool.processes.client import EngineClient, load_ipyparallel
from gpupool.pool.processes.launch import Launch

_ASK_AGAIN_S = 0.5  # for engines that the controller has and we have not heard of

NEW_POOL = "`%gpupool stop`, then `%gpupool start`, makes a new pool."
_REPLACED = "It is being replaced; the other ranks keep theirs."


class Engines:
    """One engine per rank, each at once known to have died if it has.

    `on_loss(sentence, log_tail, rank, is_heard)` is called, from a background thread, when a
    process is gone; rank is None for one that all ranks need. `is_heard`: a call that has a number
    fails by it.
    """

    def __init__(self, on_loss: Callable[[str, str, int | None, bool], None]) -> None:
        self.last_used = time.monotonic()
        self._ranks: tuple[Rank, ...] = ()
        self._on_loss = on_loss
        self._lock = threading.RLock()
        self._stopped = False
        self._up = False  # they were all there once
        self._awaiting = True  # an engine is still to come
        self._losses: list[tuple[str, str]] = []
        self._dead: dict[int, tuple[str, float]] = {}  # how it ended, and when
        self._killed: dict[int, str] = {}  # ranks that were killed on purpose -> why
        self._leaving: set[int] = set()  # ranks that are being replaced: their end is no loss
        self._open: dict[int, dict[Future[Any], int | None]] = {}  # calls -> their numbers
        self._asked: dict[int, set[Future[Answer[Any]]]] = {}  # control requests
        self._num_files = 0
        self._client: EngineClient | None = None

    @cached_property
    def _launch(self) -> Launch:
        """Made when it is first needed: wrong input starts nothing."""
        return Launch(self._on_exit)

    def lock_gpus(self, uuids: Sequence[str], number: int, force: bool = False) -> list[str]:
        """Lock `number` of these GPUs for as long as the engines run; returns which.

        Raises:
            PlacementError: other pools have too many of them.
        """
        return self._launch.lock_gpus(uuids, number, force)

    def start(self, ranks: Sequence[Rank], timeout_s: float, progress: Progress) -> None:
        """Start one engine per rank and connect to them.

        Raises:
            PoolStartError: one ended, or they were not all there in time. Nothing runs then, not
                even the agent: it may be what is wrong.
        """
        self._ranks = tuple(ranks)
        self._open = {rank.rank: {} for rank in ranks}
        self._asked = {rank.rank: set() for rank in ranks}
        try:
            self._start(_Deadline(timeout_s), progress)
        except BaseException:
            if "_launch" in vars(self):  # else an interrupt came while it was made
                self._launch.abandon()
            raise
        self._up, self._awaiting = True, False

    def restart(self, ranks: Sequence[int], timeout_s: float, progress: Progress) -> None:
        """End the engines of these ranks, dead ones too, and start new ones in their place.

        Raises:
            PoolStartError: a new one ended, or they were not all there in time.
            PoolError: the private folder was removed; nothing was ended.
        """
        assert self._client is not None
        self._launch.require_folder()
        self.last_used = time.monotonic()
        deadline = _Deadline(timeout_s)
        chosen = [rank for rank in self._ranks if rank.rank in ranks]
        with self._lock:
            self._leaving.update(ranks)
            self._losses.clear()
            given_up = {rank: set(self._open[rank]) for rank in ranks}
        had = {r.gpu.uuid: self._launch.pids.get(process_of(r.rank), 0) for r in chosen if r.gpu}
        self._launch.kill_engines(ranks)
        self._fail(given_up, "the rank was restarted", time.time())
        self._answer_for(ranks)
        for rank in ranks:
            self._client.unregister(rank)
        self._wait(
            lambda: not set(ranks) & set(self._registered()), deadline, "the controller's answer"
        )
        with self._lock:
            self._leaving.clear()
            for rank in ranks:
                self._dead.pop(rank, None)
                self._killed.pop(rank, None)  # it had ended already when it was killed
        wait_until_released(had)
        self._awaiting = True
        try:
            self._launch.start_engines(chosen)
            self._wait_for_engines(deadline, progress)
        finally:
            self._awaiting = False
        self.last_used = time.monotonic()

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process id of its engine; 0 before it was started."""
        return {rank: self._launch.pids.get(process_of(rank), 0) for rank in self.alive_ranks()}

    @property
    def client_file(self) -> Path:
        """What an `ipyparallel.Client` needs to connect."""
        return self._launch.client_file

    def alive_ranks(self) -> list[int]:
        """The ranks whose engines have not died."""
        return [r.rank for r in self._ranks if r.rank not in {*self._dead, *self._leaving}]

    def busy_ranks(self) -> list[int]:
        """The ranks that have a call to answer."""
        with self._lock:
            return [rank for rank, futures in self._open.items() if futures]

    def running(self) -> list[tuple[int, int | None]]:
        """(rank, number) of every call that is not answered; the number is None if it has none."""
        with self._lock:
            return [(rank, n) for rank, futures in self._open.items() for n in futures.values()]

    def call(
        self, rank: int, call: Call[Value], on_message: OnMessage | None = None
    ) -> Future[Reply[Value]]:
        """Make a call on one rank. Fails at once should the engine die meanwhile."""
        with self._lock:
            if self._stopped:  # by another thread
                return _failed("the pool was stopped.", time.time())
            if rank in self._dead:
                return _failed(*self._dead[rank])
            if rank not in self._registered():  # the moment in which it is being replaced
                return _failed(f"rank {rank} is being restarted.", time.time())
            assert self._client is not None
            self._client.trim()
            reply = self._client.call(rank, call, on_message)
            future: Future[Reply[Value]] = Future()
            self._open[rank][future] = call.number
        reply.add_done_callback(lambda done: self._answer(rank, future, done))
        return future

    def call_all(
        self, call: Call[Value], ranks: Iterable[int] | None = None, timeout_s: float = 60.0
    ) -> dict[int, Value]:
        """Make a call on every rank and wait for the values; for calls that take a moment.

        Raises:
            EngineDiedError: a rank is gone; others may be busy with the call still.
            UnansweredError: a rank did not answer; as above.
            PoolError: a rank failed; as above.
        """
        chosen = [r.rank for r in self._ranks] if ranks is None else ranks
        ranks_of = {self.call(rank, call): rank for rank in chosen}
        deadline = _Deadline(timeout_s)
        values, pending = {}, set(ranks_of)
        while pending and deadline.left_s > 0:
            done, pending = wait_futures(pending, deadline.left_s, FIRST_COMPLETED)
            for future in done:
                try:
                    reply = future.result()
                except load_ipyparallel().error.RemoteError as error:  # it could not even begin
                    raise PoolError(
                        f"rank {ranks_of[future]}: {error}", ranks=[ranks_of[future]]
                    ) from None
                values[ranks_of[future]] = value_of(ranks_of[future], reply)
        if pending:
            silent = sorted(ranks_of[future] for future in pending)
            listed = ", ".join(map(str, silent))
            raise UnansweredError(
                f"rank {listed} did not answer {type(call).__name__} within {timeout_s:.0f} s.",
                ranks=silent,
            )
        return values

    def interrupt(self, numbers: Mapping[int, int | None]) -> None:
        """Raise KeyboardInterrupt in these ranks' calls of these numbers; None: in any."""
        for rank, number in numbers.items():
            self.control(Interrupt(number), [rank])

    def kill(self, rank: int, reason: str) -> None:
        """End the engine of a rank, whatever it does. It is reported as lost for this reason."""
        with self._lock:
            self._killed[rank] = reason
        self._launch.signal(rank, signal.SIGKILL)

    def control(
        self, request: ControlRequest[Found], ranks: Iterable[int] | None = None
    ) -> dict[int, Future[Answer[Found]]]:
        """Send a control request to every rank (or these), busy or not: rank -> its answer.

        A rank that is just being replaced is left out. The status of one that dies is "died".
        """
        assert self._client is not None
        if self._stopped:
            return {}
        there = set(self.alive_ranks()) & set(self._registered())  # not one being replaced
        chosen = [r for r in sorted(there) if ranks is None or r in ranks]
        answers = {rank: self._client.control(rank, request) for rank in chosen}
        with self._lock:
            for rank, answer in answers.items():
                self._asked[rank].add(answer)
                answer.add_done_callback(self._asked[rank].discard)
        self._answer_for(rank for rank in chosen if rank in self._dead)
        return answers

    def new_file(self, name: str) -> Path:
        """A new path in the private folder, which every rank of this host can read."""
        self._launch.require_folder()
        with self._lock:
            self._num_files += 1
            return self._launch.folder / f"{self._num_files}-{name}"

    def log(self, rank: int) -> str:
        """The log of a rank's engine so far."""
        try:
            return self._launch.log_path(process_of(rank)).read_text(errors="replace")
        except FileNotFoundError:
            return "the log was removed, with the pool's private folder or from it.\n"

    def stop(self) -> None:
        """End every process and remove the folder."""
        self._stopped = True  # from now on an end is no loss
        try:
            if "_launch" in vars(self):
                self._launch.stop()
        finally:
            if self._client is not None:
                self._client.close()
            self._fail(self._open, "the pool was stopped", time.time())

    def _start(self, deadline: _Deadline, progress: Progress) -> None:
        self._launch.start_controller()
        self._launch.start_engines(self._ranks)
        progress(f"starting {rank_count(len(self._ranks))}")
        load_ipyparallel()  # here, because the processes need as long as this takes
        if not self._launch.preloaded.wait(0.05):
            progress("importing torch, at the first start only")
        controller = "the controller (which looks for 20 free ports on 127.0.0.1)"
        self._wait(self._launch.is_controller_up, deadline, controller)
        try:
            self._client = EngineClient(self._launch.client_file, deadline.left_s)
        except TimeoutError:
            raise self._late(deadline, "the connection to the controller") from None
        self._wait(self._launch.preloaded.is_set, deadline, "the fork server")
        self._wait_for_engines(deadline, progress)

    def _registered(self) -> list[int]:
        return self._client.ranks if self._client is not None else []

    def _wait_for_engines(self, deadline: _Deadline, progress: Progress) -> None:
        assert self._client is not None
        size, shown = len(self._ranks), -1
        asks_at = time.monotonic() + _ASK_AGAIN_S
        while shown < size:
            ready = len(self._registered())
            if ready != shown:
                progress(f"{ready} of {rank_count(size)} ready")
                shown = ready
            self._check(deadline, f"{size - ready} of the engines")
            if time.monotonic() >= asks_at:
                self._client.ask_for_engines()
                asks_at += _ASK_AGAIN_S
            time.sleep(0.01)

    def _wait(self, holds: Callable[[], bool], deadline: _Deadline, missing: str) -> None:
        while not holds():
            self._check(deadline, missing)
            time.sleep(0.01)

    def _check(self, deadline: _Deadline, missing: str) -> None:
        if self._stopped:  # by another thread, while this one waits
            raise PoolStartError("the pool was stopped.", "stopped")
        if self._losses:
            sentence, log_tail = self._losses[0]
            end = "" if self._up else " Nothing was left running."
            raise PoolStartError(with_log(f"{sentence}{end}", log_tail), "lost")
        if deadline.left_s <= 0:
            raise self._late(deadline, missing)

    def _late(self, deadline: _Deadline, missing: str) -> PoolStartError:
        end = "" if self._up else "; nothing was left running"
        return PoolStartError(
            f"{missing} did not come up within {deadline.timeout_s:g} s{end}. "
            "A larger timeout_s (--timeout) gives a slow machine more time.",
            "late",
        )

    def _answer(self, rank: int, future: Future[Any], reply: Future[Any]) -> None:
        self._closed(rank, future)
        with contextlib.suppress(InvalidStateError):  # the rank was given up meanwhile
            error = reply.exception()
            future.set_exception(error) if error else future.set_result(reply.result())

    def _closed(self, rank: int, future: Future[Any]) -> None:
        """Note that a call is over; before it is: who waits for it finds the rank idle then."""
        with self._lock:
            self._open[rank].pop(future, None)
            self.last_used = time.monotonic()

    def _on_exit(self, name: str, reason: str, log_tail: str) -> None:
        """A process of ours has ended; called from the agent's reader thread."""
        died_at = time.time()
        if self._stopped:
            return
        rank = rank_of(name)
        if rank is not None:
            lost = [rank]
            if rank in self._leaving:
                return
            with self._lock:
                reason = self._killed.pop(rank, reason)
            sentence = f"{name} {reason}."
            long = f"{name} {reason}; its variables are lost. {_REPLACED}"
        elif name == FORK_SERVER:
            # Who is awaited does not come; who is there does without, and loses nothing.
            with self._lock:
                if self._awaiting:
                    self._losses.append((f"the fork server of the pool {reason}.", log_tail))
            return
        else:
            sentence = f"the {name} of the pool {reason}; its ranks are out of reach."
            long = f"{sentence} {NEW_POOL}"
            lost = self.alive_ranks()
        message = with_log(long, log_tail)
        with self._lock:
            self._losses.append((sentence, log_tail))
            is_heard = any(n is not None for rank in lost for n in self._open[rank].values())
        self._on_loss(sentence, log_tail, rank, is_heard)
        # Now: whoever sees that a rank is gone may count on its replacement. That cannot be there
        # before, as it needs an answer of the agent, which this thread reads.
        with self._lock:
            self._dead.update(dict.fromkeys(lost, (message, died_at)))
        self._fail({rank: self._open[rank] for rank in lost}, message, died_at)
        self._answer_for(lost)

    def _fail(
        self, open_calls: Mapping[int, Iterable[Future[Any]]], message: str, died_at: float
    ) -> None:
        with self._lock:
            lost = [(rank, future) for rank, futures in open_calls.items() for future in futures]
        for rank, future in lost:
            self._closed(rank, future)
            with contextlib.suppress(InvalidStateError):  # its answer has come after all
                future.set_exception(EngineDiedError(message, died_at))

    def _answer_for(self, ranks: Iterable[int]) -> None:
        """Nobody waits for what a rank would have said that is gone."""
        with self._lock:
            asked = [answer for rank in ranks for answer in self._asked[rank]]
        for answer in asked:
            with contextlib.suppress(InvalidStateError):
                answer.set_result(Answer("died"))


def _failed(message: str, died_at: float) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(EngineDiedError(message, died_at))
    return future


class _Deadline:
    """A point in time, and how long it was away when it was set."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until then; negative afterwards."""
        return self._at - time.monotonic()


def value_of(rank: int, reply: Reply[Value]) -> Value:
    """The value of a reply; raises the PoolError for one that says what was raised."""
    if reply.raised is not None:
        error = reply.raised.error
        message = of_rank(rank, error.evalue or error.ename)
        raise PoolError(message, error.kind, *error.names, ranks=[rank])
    return reply.value


def of_rank(rank: int, message: str) -> str:
    """A rank's message with its number, once."""
    return message if message.startswith(f"rank {rank} ") else f"rank {rank}: {message}"


def with_log(sentence: str, log_tail: str) -> str:
    """A sentence about a process, with the end of its log, if there is one, below."""
    return f"{sentence}\nThe end of its log:\n{log_tail}" if log_tail else sentence
