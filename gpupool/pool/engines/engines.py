"""The engines of one pool and the calls to them, from start to stop. Runs on the client.

What they are used for (cells, the process group, the environment) is the pool's business.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, as_completed, wait
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from pathlib import Path
from typing import Any

from gpupool.core.errors import EngineDiedError, PoolError, PoolStartError, UnansweredError
from gpupool.core.formatting import format_ranks, rank_count
from gpupool.core.machine.gpus import wait_until_released
from gpupool.core.machine.topology import Rank
from gpupool.core.options.clusters import cluster_of
from gpupool.core.options.pool_options import PoolOptions
from gpupool.core.wire.calls import Call
from gpupool.core.wire.events import from_dict
from gpupool.core.wire.masking import Secrets, redact, redact_all
from gpupool.core.wire.output import OnOutput, OutputKind
from gpupool.core.wire.replies import Reply, Value
from gpupool.core.wire.requests import Answer, ControlRequest, Found, Interrupt, ReadFile
from gpupool.core.wire.starter import CONTROLLER, STARTER, log_of, process_of, rank_of
from gpupool.pool.engines.client import EngineClient, load_ipyparallel, unheard_output
from gpupool.pool.launchers.hosts import Hosts
from gpupool.pool.launchers.placement import Placement, place_ranks
from gpupool.pool.launchers.processes import Forked
from gpupool.pool.notices import Progress

_CONNECT_S = 5.0
_LOG_S, _LOG_BYTES = 5.0, 1 << 18
_ASK_AGAIN_S = 0.5  # for engines that the controller has and we have not heard of


class State(Enum):
    THERE = auto()  # or asked for
    LEAVING = auto()  # it is ended on purpose, and another one comes: its end is no loss
    LOST = auto()


NEW_POOL = "`%gpupool stop`, then `%gpupool start`, makes a new pool."
_OF_RANK = "its variables are lost. It is being replaced; the other ranks keep theirs."
_OF_ALL = f"its ranks are out of reach. {NEW_POOL}"


@dataclass(frozen=True)
class Loss:
    """The end of a process: who it was, how it ended, what that means. Its texts are masked."""

    who: str
    how: str  # as in "was killed by SIGKILL"
    meaning: str = _OF_RANK
    log_tail: str = ""
    at: float = field(default_factory=time.time)
    is_heard: bool = True  # a call that has a number fails by it

    @property
    def sentence(self) -> str:
        return f"{self.who} {self.how}."

    def error(self) -> EngineDiedError:
        message = with_log(f"{self.who} {self.how}; {self.meaning}", self.log_tail)
        return EngineDiedError(message, self.at)


@dataclass(eq=False)
class _Engine:
    """The engine of a rank: its state, and who waits for what it says.

    `loss` says why it is to be replaced; it stays until the new one is in the group.
    """

    place: Rank
    state: State = State.THERE
    loss: Loss | None = None
    doom: str = ""  # why it is being killed, if it is
    calls: dict[Future[Any], int | None] = field(default_factory=dict)  # -> their numbers
    requests: set[Future[Answer[Any]]] = field(default_factory=set)

    @property
    def name(self) -> str:
        """As in "rank 9 (gpu2)"; the host only where it is not the notebook's."""
        rank = self.place.rank
        return f"rank {format_ranks([rank], {rank: self.place.host})}"


class Engines:
    """One engine per rank, each at once known to be lost if it is. Any thread may call it.

    `changed` is notified at every change of a rank's state, and when a call ends: whoever waits for
    such a thing waits on it. It is held for moments only; who holds it may ask all below.
    `broken` is the end of a process that all ranks need. `secrets` are masked in what comes back.

    `on_loss(rank, loss)` is called, with `changed` held, just before a rank is seen to be lost: it
    cannot be replaced before, as that needs an answer of the starter, which this thread reads.
    """

    def __init__(self, timeout_s: float, on_loss: Callable[[int, Loss], None]) -> None:
        self.last_used = time.monotonic()
        self.changed = threading.Condition()
        self.secrets = Secrets()
        self.stopped = False
        self.broken: Loss | None = None
        self._engines: dict[int, _Engine] = {}
        self._timeout_s = timeout_s
        self._on_loss = on_loss
        self._is_up = False  # all have been there
        self._numbers = itertools.count(1)  # of files
        self._client: EngineClient | None = None

    @cached_property
    def launch(self) -> Forked:
        """What starts the processes. Made when it is first needed: wrong input starts nothing."""
        return Forked(self._on_exit)

    def place(self, options: PoolOptions, progress: Progress) -> Placement:
        """Choose a place for each rank that the options ask for, and lock its GPU; raises as
        `placement.place_ranks` and `Hosts.place` do."""
        if cluster := cluster_of(options):
            self.launch = hosts = Hosts(cluster, options, self._on_exit)
            return hosts.place(progress)
        return place_ranks(options, lambda uuids, n: self.launch.lock_gpus(uuids, n, options.force))

    def start(self, ranks: Sequence[Rank], progress: Progress) -> None:
        """Start one engine per rank and connect to them; a PoolStartError if one ended, or they
        were not all there in time."""
        self._engines = {place.rank: _Engine(place) for place in ranks}
        self.launch.start_controller()
        progress(f"starting {rank_count(len(ranks))}")
        if not self.launch.preloaded.wait(0.05):
            progress("importing torch, at the first start only")
        self._bring_up(ranks)
        self._is_up = True

    def restart(self, ranks: Sequence[int]) -> None:
        """End the engines of these ranks, dead ones too, and start new ones in their place.

        Raises as `start`; a PoolError if the private folder was removed, and nothing was ended.
        """
        assert self._client is not None
        client, pids = self._client, self.launch.pids
        self.launch.require_folder()
        self.last_used = time.monotonic()
        chosen = [self._engines[rank] for rank in ranks]
        places = [engine.place for engine in chosen]
        self._set(chosen, State.LEAVING)
        had = {
            place.gpu.uuid: pids.get(process_of(place.rank), 0)
            for place in places
            if place.gpu and not place.host
        }
        self.launch.kill_engines(ranks)
        self._give_up(chosen, EngineDiedError("the rank was restarted"))
        for rank in ranks:
            client.unregister(rank)
        answer = "the controller's answer"
        self._wait(lambda: answer if {*ranks}.intersection(client.ranks) else "")
        # one that is lost since then is so with the controller
        self._set((one for one in chosen if one.state is State.LEAVING), State.THERE)
        wait_until_released(had)
        self._bring_up(places)

    # ---- what is known of them -----------------------------------------------------------

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> process id of its engine; 0 before it was started."""
        return {rank: self.launch.pids.get(process_of(rank), 0) for rank in self.alive_ranks()}

    def host_of(self, rank: int) -> str:
        """The other host that a rank is on; "" if it is on the notebook's."""
        return self._engines[rank].place.host

    def alive_ranks(self) -> list[int]:
        """The ranks whose engines are there, or are coming for the first time or again."""
        with self.changed:
            return [rank for rank, one in self._engines.items() if one.state is State.THERE]

    def running(self) -> list[tuple[int, int | None]]:
        """(rank, number) of every call that is not answered; the number is None if it has none."""
        with self.changed:
            return [(rank, n) for rank, one in self._engines.items() for n in one.calls.values()]

    @property
    def losses(self) -> dict[int, Loss]:
        """The ranks that are to be replaced, the first that was lost first."""
        with self.changed:
            found = {rank: one.loss for rank, one in self._engines.items() if one.loss is not None}
        return dict(sorted(found.items(), key=lambda item: item[1].at))

    def lose(self, ranks: Iterable[int], how: str) -> None:
        """These ranks are to be replaced, whether their engines live or not."""
        with self.changed:
            for rank in ranks:
                engine = self._engines[rank]
                engine.loss = engine.loss or Loss(engine.name, how)

    def note_replaced(self, ranks: Iterable[int]) -> None:
        """These ranks are no longer to be replaced, but for those that have died again."""
        with self.changed:
            for rank in ranks:
                if self._engines[rank].state is State.THERE:
                    self._engines[rank].loss = None

    def log(self, rank: int) -> str:
        """The end of the log of a rank's engine; one on another host sends it itself."""
        name, found = log_of(process_of(rank)), None
        if self.host_of(rank):
            asked = self.control(ReadFile(name, -_LOG_BYTES, _LOG_BYTES), [rank])
            for answer in wait(asked.values(), _LOG_S).done:
                found = answer.result().found
        else:
            with contextlib.suppress(FileNotFoundError):
                found = Path(self.launch.folder, name).read_bytes()
        if found is None:
            return "there is no log: it was removed, with the pool's folder, or the rank is lost.\n"
        return redact(str(found, errors="replace"), self.secrets)  # bytes, or a view of some

    # ---- what is asked of them -----------------------------------------------------------

    def call(
        self, rank: int, call: Call[Value], on_output: OnOutput = unheard_output
    ) -> Future[Reply[Value]]:
        """Make a call on one rank. Fails at once should the engine die meanwhile."""
        engine = self._engines[rank]

        def on_message(kind: OutputKind, content: Any) -> None:
            if kind is OutputKind.EVENTS:  # the recorder masks all else, chunk by chunk
                content = [from_dict(plain) for plain in redact_all(content, self.secrets)]
            on_output(rank, kind, content)

        with self.changed:
            if why := self._why_not(engine):
                refused: Future[Reply[Value]] = Future()
                refused.set_exception(why)
                return refused
            assert self._client is not None
            future = self._client.call(
                rank, call, on_message, lambda ended: self._note_end(engine, ended)
            )
            engine.calls[future] = call.number
            if future.done():  # the answer was faster than this thread
                self._note_end(engine, future)
        return future

    def call_all(
        self, call: Call[Value], ranks: Iterable[int] | None = None, timeout_s: float = 60.0
    ) -> dict[int, Value]:
        """Make a call on every rank and wait for the values; for calls that take a moment.

        A PoolError if a rank failed, an EngineDiedError if it is gone, an UnansweredError if it
        says nothing: others may be busy with the call still.
        """
        chosen = self._engines if ranks is None else ranks
        asked = {self.call(rank, call): rank for rank in chosen}
        values = {}
        try:
            for future in as_completed(asked, timeout_s):
                rank, error = asked[future], future.exception()
                if isinstance(error, PoolError):
                    raise error
                if error is not None:  # it could not even begin
                    raise PoolError(f"rank {rank}: {error}", ranks=[rank])
                values[rank] = value_of(rank, future.result())
        except TimeoutError:
            silent = sorted({*asked.values()} - values.keys())
            for future, rank in asked.items():  # it may be lost
                self._note_end(self._engines[rank], future)
            listed = ", ".join(map(str, silent))
            raise UnansweredError(
                f"rank {listed} did not answer {type(call).__name__} within {timeout_s:.0f} s.",
                ranks=silent,
            ) from None
        return values

    def control(
        self, request: ControlRequest[Found], ranks: Iterable[int]
    ) -> dict[int, Future[Answer[Found]]]:
        """Send a control request to some ranks, busy or not: rank -> its answer.

        One that is lost or being replaced is left out. The status of one that dies meanwhile is
        "died"; one that does not react never answers.
        """
        answers = {}
        with self.changed:
            for rank in sorted(ranks):
                engine = self._engines[rank]
                if self._client is not None and self._why_not(engine) is None:
                    answers[rank] = answer = self._client.control(rank, request)
                    engine.requests.add(answer)
                    answer.add_done_callback(engine.requests.discard)
        return answers

    def interrupt(self, numbers: Mapping[int, int | None]) -> None:
        """Raise KeyboardInterrupt in these ranks' calls of these numbers; None: in any."""
        for rank, number in numbers.items():
            self.control(Interrupt(number), [rank])

    def kill(self, rank: int, reason: str) -> None:
        """End the engine of a rank, whatever it does. It is reported as lost for this reason."""
        with self.changed:
            self._engines[rank].doom = reason
        self.launch.kill_engines([rank], waits=False)

    def new_file(self, name: str) -> Path:
        """A new path in the private folder, which every rank of this host can read."""
        self.launch.require_folder()
        return Path(self.launch.folder, f"{next(self._numbers)}-{name}")

    def stop(self) -> bool:
        """End every process and remove the folder; returns whether that was still to be done."""
        with self.changed:
            is_first, self.stopped = not self.stopped, True  # from now on an end is no loss
            self.changed.notify_all()
        if is_first:
            try:
                if "launch" in vars(self):  # else an interrupt came while it was made
                    # A starter that has not brought them up may be what is wrong.
                    self.launch.stop(for_good=bool(self._engines) and not self._is_up)
            finally:
                if self._client is not None:
                    self._client.close()
                self._give_up(self._engines.values(), EngineDiedError("the pool was stopped."))
        return is_first

    def too_late(self, what: str) -> PoolStartError:
        return PoolStartError(
            f"{what} did not come up within {self._timeout_s:g} s. "
            "A larger timeout_s (--timeout) gives a slow machine more time."
        )

    # ---- inside --------------------------------------------------------------------------

    def _bring_up(self, places: Iterable[Rank]) -> None:
        """Start engines at these places; returns when all have registered."""
        self.launch.start_engines(places)  # which brings back a host that was lost
        load_ipyparallel()  # here, because the processes need as long as this takes
        self._wait(self._missing)

    def _missing(self) -> str:
        if not self.launch.is_controller_up():
            return "the controller (which looks for 20 free ports on 127.0.0.1)"
        # A connection waits in vain if all ends meanwhile, by a torch that cannot be imported.
        if not self.launch.preloaded.is_set():
            return "torch"
        try:
            self._client = self._client or EngineClient(self.launch.client_file, _CONNECT_S)
        except TimeoutError:
            return "the connection to the controller"
        number = len(self._engines) - len(self._client.ranks)
        return f"{number} of the engines" if number else ""

    def _wait(self, missing: Callable[[], str]) -> None:
        """Wait until nothing is missing: nothing notifies of what a file or the controller says."""
        began_at = time.monotonic()
        ask_at = began_at + _ASK_AGAIN_S
        while what := missing():
            if self.stopped:  # by another thread, while this one waits
                raise PoolStartError("the pool was stopped.")
            for rank, loss in self.losses.items():
                if self._engines[rank].state is State.LOST:
                    raise PoolStartError(with_log(loss.sentence, loss.log_tail))
            if time.monotonic() > began_at + self._timeout_s:
                raise self.too_late(what)
            if self._client is not None and time.monotonic() > ask_at:
                self._client.ask_for_engines()
                ask_at += _ASK_AGAIN_S
            time.sleep(0.01)

    def _set(self, engines: Iterable[_Engine], state: State) -> None:
        with self.changed:
            for engine in engines:
                engine.state, engine.doom = state, ""
            self.changed.notify_all()

    def _why_not(self, engine: _Engine) -> EngineDiedError | None:
        """Why nothing can be asked of an engine, if so."""
        if self.stopped:
            return EngineDiedError("the pool was stopped.")
        if engine.state is State.LOST and engine.loss is not None:
            return engine.loss.error()
        rank, client = engine.place.rank, self._client
        if engine.state is State.LEAVING or client is None or rank not in client.ranks:
            return EngineDiedError(f"rank {rank} is being restarted.")
        return None

    def _note_end(self, engine: _Engine, future: Future[Any]) -> None:
        """Note that a call is over; before it is: who waits for it finds the rank idle then."""
        with self.changed:
            engine.calls.pop(future, None)
            self.last_used = time.monotonic()
            self.changed.notify_all()

    def _on_exit(self, name: str, how: str, log_tail: str) -> None:
        """A process of ours has ended; called from a background thread of the launcher."""
        rank = rank_of(name)
        how, log_tail = redact(how, self.secrets), redact(log_tail, self.secrets)
        with self.changed:
            if self.stopped or (rank is not None and self._engines[rank].state is State.LEAVING):
                return
            if rank is None:
                lost = list(self._engines.values())
                who = f"the {name} of the pool" if name in (STARTER, CONTROLLER) else name
                loss = self.broken = Loss(who, how, _OF_ALL, log_tail)
            else:
                lost = [one := self._engines[rank]]
                has_calls = any(number is not None for number in one.calls.values())
                is_heard = has_calls or one.loss is not None
                loss = Loss(one.name, one.doom or how, log_tail=log_tail, is_heard=is_heard)
                self._on_loss(rank, loss)
            for engine in lost:
                if engine.state is not State.LOST:
                    engine.loss = loss
            self._set(lost, State.LOST)
        self._give_up(lost, loss.error())

    def _give_up(self, engines: Iterable[_Engine], why: EngineDiedError) -> None:
        """Nobody waits any more for what these engines would have said."""
        with self.changed:
            calls = [(one, future) for one in engines for future in one.calls]
            requests = [answer for one in engines for answer in list(one.requests)]
        for engine, future in calls:
            self._note_end(engine, future)
            with contextlib.suppress(InvalidStateError):  # its answer has come after all
                future.set_exception(why)
        for answer in requests:
            with contextlib.suppress(InvalidStateError):
                answer.set_result(Answer("died"))


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
