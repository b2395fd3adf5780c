"""The engines of one pool and the calls to them, from start to stop. Runs on the client.

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
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from pathlib import Path
from typing import Any

from gpupool.core.errors import EngineDiedError, PoolError, PoolStartError, UnansweredError
from gpupool.core.formatting import rank_count
from gpupool.core.machine.nvml import wait_until_released
from gpupool.core.machine.topology import Rank
from gpupool.core.wire.calls import Call
from gpupool.core.wire.output import OnMessage
from gpupool.core.wire.replies import Reply, Value
from gpupool.core.wire.requests import Answer, ControlRequest, Found, Interrupt
from gpupool.core.wire.starter import process_of, rank_of
from gpupool.pool.engines.client import EngineClient, load_ipyparallel
from gpupool.pool.launchers.base import Launcher
from gpupool.pool.launchers.forked import Forked
from gpupool.pool.notices import Progress

_ASK_AGAIN_S = 0.5  # for engines that the controller has and we have not heard of

NEW_POOL = "`%gpupool stop`, then `%gpupool start`, makes a new pool."
_REPLACED = "It is being replaced; the other ranks keep theirs."


class State(Enum):
    """What the engine of a rank does, as far as is known."""

    COMING = auto()  # it was asked for
    UP = auto()
    LEAVING = auto()  # it is ended on purpose, and another one comes: its end is no loss
    LOST = auto()


@dataclass(frozen=True)
class Loss:
    """Why an engine is out of reach: in a sentence, and in the words of a call that fails by it."""

    sentence: str
    log_tail: str
    message: str
    at: float

    def error(self) -> EngineDiedError:
        """That of a call."""
        return EngineDiedError(self.message, self.at)


@dataclass(eq=False)
class _Engine:
    """The engine of a rank: its state, and who waits for what it says."""

    place: Rank
    state: State = State.COMING
    loss: Loss | None = None  # of one that is lost
    doom: str = ""  # why it is being killed, if it is
    calls: dict[Future[Any], int | None] = field(default_factory=dict)  # -> their numbers
    requests: set[Future[Answer[Any]]] = field(default_factory=set)


class Engines:
    """One engine per rank, each at once known to be lost if it is.

    `changed` is notified at every change of a rank's state, and when a call ends: whoever waits for
    such a thing waits on it. It is held for moments only; who holds it may ask all below.

    `on_loss(sentence, log_tail, rank, is_heard)` is called, from a background thread, when a
    process is gone; rank is None for one that all ranks need. `is_heard`: a call that has a number
    fails by it.
    """

    def __init__(self, on_loss: Callable[[str, str, int | None, bool], None]) -> None:
        self.last_used = time.monotonic()
        self.changed = threading.Condition()
        self._engines: dict[int, _Engine] = {}
        self._on_loss = on_loss
        self._stopped = False
        self._num_files = 0
        self._client: EngineClient | None = None

    @cached_property
    def _launch(self) -> Launcher:
        """Made when it is first needed: wrong input starts nothing."""
        return Forked(self._on_exit)

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
                even the starter: it may be what is wrong.
        """
        self._engines = {place.rank: _Engine(place) for place in ranks}
        try:
            self._start(_Deadline(timeout_s, " Nothing was left running."), progress)
        except BaseException:
            if "_launch" in vars(self):  # else an interrupt came while it was made
                self._launch.stop(for_good=True)
            raise

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
        chosen = [self._engines[rank] for rank in ranks]
        places = [engine.place for engine in chosen]
        self._set(chosen, State.LEAVING)
        pids = self._launch.pids
        had = {p.gpu.uuid: pids.get(process_of(p.rank), 0) for p in places if p.gpu}
        self._launch.kill_engines(ranks)
        self._give_up(chosen, "the rank was restarted")
        for rank in ranks:
            self._client.unregister(rank)
        self._wait(
            lambda: not set(ranks) & set(self._registered()), deadline, "the controller's answer"
        )
        # one that is lost since then is so with the controller
        self._set((one for one in chosen if one.state is State.LEAVING), State.COMING)
        wait_until_released(had)
        self._launch.start_engines(places)
        self._wait_for_engines(deadline, progress)
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
        """The ranks whose engines are there, or are coming for the first time or again."""
        with self.changed:
            gone = State.LEAVING, State.LOST
            return [rank for rank, one in self._engines.items() if one.state not in gone]

    def busy_ranks(self) -> list[int]:
        """The ranks that have a call to answer."""
        with self.changed:
            return [rank for rank, one in self._engines.items() if one.calls]

    def running(self) -> list[tuple[int, int | None]]:
        """(rank, number) of every call that is not answered; the number is None if it has none."""
        with self.changed:
            return [(rank, n) for rank, one in self._engines.items() for n in one.calls.values()]

    def call(
        self, rank: int, call: Call[Value], on_message: OnMessage | None = None
    ) -> Future[Reply[Value]]:
        """Make a call on one rank. Fails at once should the engine die meanwhile."""
        future: Future[Reply[Value]] = Future()
        engine = self._engines[rank]
        with self.changed:
            if why := self._why_not(engine):
                future.set_exception(why)
                return future
            assert self._client is not None
            self._client.trim()
            reply = self._client.call(rank, call, on_message)
            engine.calls[future] = call.number
        reply.add_done_callback(lambda done: self._answer(engine, future, done))
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
        chosen = self._engines if ranks is None else ranks
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
        with self.changed:
            self._engines[rank].doom = reason
        self._launch.signal(rank, signal.SIGKILL)

    def control(
        self, request: ControlRequest[Found], ranks: Iterable[int] | None = None
    ) -> dict[int, Future[Answer[Found]]]:
        """Send a control request to every rank (or these), busy or not: rank -> its answer.

        A rank that is just being replaced is left out. The status of one that dies is "died".
        """
        assert self._client is not None
        answers = {}
        chosen = self._engines.keys() & (self._engines.keys() if ranks is None else ranks)
        with self.changed:
            for rank in sorted(chosen):
                engine = self._engines[rank]
                if self._why_not(engine) is None:
                    answers[rank] = answer = self._client.control(rank, request)
                    engine.requests.add(answer)
                    answer.add_done_callback(engine.requests.discard)
        return answers

    def new_file(self, name: str) -> Path:
        """A new path in the private folder, which every rank of this host can read."""
        self._launch.require_folder()
        with self.changed:
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
        with self.changed:
            self._stopped = True  # from now on an end is no loss
            self.changed.notify_all()
        try:
            if "_launch" in vars(self):
                self._launch.stop()
        finally:
            if self._client is not None:
                self._client.close()
            self._give_up(self._engines.values(), "the pool was stopped")

    def _start(self, deadline: _Deadline, progress: Progress) -> None:
        self._launch.start_controller()
        self._launch.start_engines(one.place for one in self._engines.values())
        progress(f"starting {rank_count(len(self._engines))}")
        load_ipyparallel()  # here, because the processes need as long as this takes
        if not self._launch.preloaded.wait(0.05):
            progress("importing torch, at the first start only")
        controller = "the controller (which looks for 20 free ports on 127.0.0.1)"
        self._wait(self._launch.is_controller_up, deadline, controller)
        # A connection waits in vain if all ends meanwhile, by a torch that cannot be imported.
        self._wait(self._launch.preloaded.is_set, deadline, "torch")
        try:
            self._client = EngineClient(self._launch.client_file, deadline.left_s)
        except TimeoutError:
            raise deadline.late("the connection to the controller") from None
        self._wait_for_engines(deadline, progress)

    def _registered(self) -> list[int]:
        return self._client.ranks if self._client is not None else []

    def _wait_for_engines(self, deadline: _Deadline, progress: Progress) -> None:
        """Wait until all are registered; those that were coming are up then."""
        assert self._client is not None
        size, shown = len(self._engines), -1
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
        engines = self._engines.values()
        self._set((one for one in engines if one.state is State.COMING), State.UP)

    def _wait(self, holds: Callable[[], bool], deadline: _Deadline, missing: str) -> None:
        """Wait for what a file or the controller says: nothing notifies of it."""
        while not holds():
            self._check(deadline, missing)
            time.sleep(0.01)

    def _check(self, deadline: _Deadline, missing: str) -> None:
        """Raise what there is no use in waiting for `missing` for."""
        if self._stopped:  # by another thread, while this one waits
            raise PoolStartError("the pool was stopped.")
        losses = [one.loss for one in self._engines.values() if one.loss is not None]
        if losses:
            raise deadline.lost(min(losses, key=lambda loss: loss.at))
        if deadline.left_s <= 0:
            raise deadline.late(missing)

    def _set(self, engines: Iterable[_Engine], state: State, loss: Loss | None = None) -> None:
        with self.changed:
            for engine in engines:
                engine.state, engine.loss, engine.doom = state, loss, ""
            self.changed.notify_all()

    def _why_not(self, engine: _Engine) -> EngineDiedError | None:
        """Why nothing can be asked of an engine, if so."""
        if self._stopped:
            return EngineDiedError("the pool was stopped.", time.time())
        if engine.loss is not None:
            return engine.loss.error()
        rank = engine.place.rank
        if engine.state is not State.UP or rank not in self._registered():
            return EngineDiedError(f"rank {rank} is being restarted.", time.time())
        return None

    def _answer(self, engine: _Engine, future: Future[Any], reply: Future[Any]) -> None:
        self._closed(engine, future)
        with contextlib.suppress(InvalidStateError):  # the rank was given up meanwhile
            error = reply.exception()
            future.set_exception(error) if error else future.set_result(reply.result())

    def _closed(self, engine: _Engine, future: Future[Any]) -> None:
        """Note that a call is over; before it is: who waits for it finds the rank idle then."""
        with self.changed:
            engine.calls.pop(future, None)
            self.last_used = time.monotonic()
            self.changed.notify_all()

    def _on_exit(self, name: str, reason: str, log_tail: str) -> None:
        """A process of ours has ended; called from a background thread of the launcher."""
        at, rank = time.time(), rank_of(name)
        with self.changed:
            lost = list(self._engines.values()) if rank is None else [self._engines[rank]]
            if self._stopped or (rank is not None and lost[0].state is State.LEAVING):
                return
            if rank is None:
                sentence = f"the {name} of the pool {reason}; its ranks are out of reach."
                long = f"{sentence} {NEW_POOL}"
            else:
                reason = lost[0].doom or reason
                sentence = f"{name} {reason}."
                long = f"{name} {reason}; its variables are lost. {_REPLACED}"
            is_heard = any(n is not None for one in lost for n in one.calls.values())
        self._on_loss(sentence, log_tail, rank, is_heard)
        # Now: whoever sees that a rank is gone may count on its replacement. That cannot be there
        # before, as it needs an answer of the starter, which this thread reads.
        loss = Loss(sentence, log_tail, with_log(long, log_tail), at)
        self._set((one for one in lost if one.loss is None), State.LOST, loss)
        self._give_up(lost, loss.message, at)

    def _give_up(self, engines: Iterable[_Engine], why: str, at: float | None = None) -> None:
        """Nobody waits any more for what these engines would have said."""
        with self.changed:
            calls = [(one, future) for one in engines for future in one.calls]
            requests = [answer for one in engines for answer in list(one.requests)]
        for engine, future in calls:
            self._closed(engine, future)
            with contextlib.suppress(InvalidStateError):  # its answer has come after all
                future.set_exception(EngineDiedError(why, at or time.time()))
        for answer in requests:
            with contextlib.suppress(InvalidStateError):
                answer.set_result(Answer("died"))


class _Deadline:
    """A point in time, and what an error says of what is left then."""

    def __init__(self, timeout_s: float, leaves: str = "") -> None:
        self._timeout_s, self._leaves = timeout_s, leaves
        self._at = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until then; negative afterwards."""
        return self._at - time.monotonic()

    def lost(self, loss: Loss) -> PoolStartError:
        """The error of a start in which this was lost."""
        return PoolStartError(with_log(f"{loss.sentence}{self._leaves}", loss.log_tail))

    def late(self, missing: str) -> PoolStartError:
        """The error of a start in which this did not come."""
        return PoolStartError(
            f"{missing} did not come up within {self._timeout_s:g} s.{self._leaves} "
            "A larger timeout_s (--timeout) gives a slow machine more time."
        )


def value_of(rank: int, reply: Reply[Value]) -> Value:
    """The value of a reply; raises the PoolError for one that says what was raised."""
    if reply.raised is not None:
        error = reply.raised.error
        message = of_rank(rank, error.evalue or error.ename)
        raise PoolError(message, ranks=[rank])
    return reply.value


def of_rank(rank: int, message: str) -> str:
    """A rank's message with its number, once."""
    return message if message.startswith(f"rank {rank} ") else f"rank {rank}: {message}"


def with_log(sentence: str, log_tail: str) -> str:
    """A sentence about a process, with the end of its log, if there is one, below."""
    return f"{sentence}\nThe end of its log:\n{log_tail}" if log_tail else sentence
