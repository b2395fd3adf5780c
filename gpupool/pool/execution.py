"""One engine function on several ranks at once: wait, free the blocked. Runs on the client.

A background thread supervises each execution, so that the caller's thread only waits for an event
and hears the user's interrupt at once. When a rank fails or the user interrupts while others still
run, every rank is told to abort its collectives (`gpupool/engine/abort.py`): nobody waits for a
peer that does not come. The pool then forms the group again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any

from gpupool.core.errors import RankError, SpmdError
from gpupool.core.masking import redact
from gpupool.pool.presses import ignore_for_a_moment

if TYPE_CHECKING:
    from gpupool.pool.pool import Pool

GRACE_S = 0.25  # after a first failure the others may still finish or fail by themselves
REACT_S = 3.0  # a rank that has not reacted to an interrupt by then is given up

_REFUSALS = ("TypeError", "ValueError")  # of a collective that has not begun

# (rank, kind, content): see `gpupool.pool.iopub.OnMessage`
OnOutput = Callable[[int, str, Any], None]

# A sentence to show while the call runs; None: it is over. Called in a background thread.
OnNotice = Callable[[str | None], None]


def unnoticed(text: str | None) -> None:
    """Ignore a notice."""


class Execution:
    """The running call of `gpupool.engine.entry.<name>` on the ranks in `payloads`.

    `replies` maps rank to the reply of each rank that has finished; `errors` those that failed.
    While it waits its turn on ranks that are in use, `waits_for` names what runs there.
    """

    def __init__(
        self,
        pool: Pool,
        name: str,
        payloads: Mapping[int, dict[str, Any]],
        on_output: OnOutput,
        timeout_s: float | None = None,
        on_notice: OnNotice = unnoticed,
    ) -> None:
        self._on_notice = on_notice
        self.ranks = tuple(payloads)
        self.replies: dict[int, dict[str, Any]] = {}
        self.errors: dict[int, RankError] = {}
        self.names: dict[int, dict[str, Any]] = {}  # what a cell left, of failed ranks too
        self.elapsed_s = 0.0
        self.keeps: object = None  # what has to live until the end of this
        self._exceptions: dict[int, BaseException] = {}  # of an inline pool's rank
        self._pool = pool
        self._hidden = pool.hidden_values()
        self._started = time.monotonic()
        self._timeout_s = timeout_s
        self._timed_out = False
        self._interrupted = threading.Event()
        self._finished = threading.Event()
        self._signalled_at: float | None = None
        self._aborted = False
        self._group_wanting = False  # the process group was left, or has failed
        self._futures: dict[Future[Any], int] = {}
        self._called = threading.Event()

        def call() -> None:
            for rank, payload in payloads.items():
                self._futures[pool.call(rank, name, payload, on_output)] = rank

        self._call = call
        self._payloads = payloads
        self._turn = pool.turns.ask(payloads, _title(name, payloads))
        self.waits_for = [] if pool.options.inline else pool.turns.begin(self._turn)
        self._waits = bool(self.waits_for)
        self._begin_supervision()

    def done(self) -> bool:
        """Whether every rank has finished."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, at most `timeout_s`; tells whether it has come."""
        return self._finished.wait(timeout_s)

    def error(self) -> SpmdError | None:
        """The errors so far as one, if there are any."""
        return SpmdError(self.errors, len(self.ranks)) if self.errors else None

    def interrupt(self) -> None:
        """Interrupt the ranks that still run; returns at once. May be called again."""
        self._interrupted.set()

    def result(self, tick: Callable[[], None] = lambda: None) -> dict[int, dict[str, Any]]:
        """The replies by rank, after waiting for them. Ctrl-C meanwhile interrupts the ranks.

        Args:
            tick: called every 0.1 s while waiting, in this thread.

        Raises:
            SpmdError: one or more ranks failed.
        """
        __tracebackhide__ = True
        while True:
            try:
                # In slices: a wait without limit would not hear the interrupt on every platform.
                while not self.wait(0.1):
                    tick()
                break
            except KeyboardInterrupt:
                ignore_for_a_moment()
                self.interrupt()
        error = self.error()
        if error is None:
            return self.replies
        cause = self._exceptions.get(error.first.rank)
        if cause is None:
            raise error
        # It was raised in this process: a debugger that is given our error stops in that frame.
        raise error.with_traceback(cause.__traceback__) from cause

    def _begin_supervision(self) -> None:
        """Have a thread supervise, and make the calls here unless they have to wait their turn.

        An interrupt that comes meanwhile ends what has begun: nothing may stay in the row of turns.
        """
        # Before the calls: to start a thread takes 2 ms while ipyparallel's is busy sending them.
        thread = threading.Thread(target=self._supervise, name="gpupool-execution", daemon=True)
        try:
            thread.start()
            if not self._waits:  # in this thread: an inline pool works here and now
                self._turn.began = True
                self._call()
        except BaseException:
            self.interrupt()
            if thread.ident is None:
                self._pool.turns.end(self._turn)
            raise
        finally:
            self._called.set()

    # ---- in the supervising thread -------------------------------------------------------

    def _supervise(self) -> None:
        try:
            if self._begin():
                self._watch()
        except Exception as error:  # whoever waits has to hear of it
            self._fail(type(error).__name__, str(error))
        finally:
            if self.errors and self._futures:
                self._pool.last_error = self.error()
            self._leave()

    def _leave(self) -> None:
        interrupted = self._aborted or self._signalled_at is not None
        try:
            self._pool.turns.end(self._turn, broke_group=interrupted or self._group_wanting)
        finally:
            self.keeps = None
            self._finished.set()

    def _begin(self) -> bool:
        """Wait for the turn, if it has not come at once; tells whether the calls are made."""
        if not self._waits:
            self._called.wait()
            return bool(self._futures)
        while self.waits_for and not self._interrupted.wait(0.02):
            self.waits_for = self._pool.turns.begin(self._turn)
        if self.waits_for:
            names = ", ".join(dict.fromkeys(self.waits_for))
            self._fail("KeyboardInterrupt", f"interrupted while it waited for {names}")
            return False
        self._pool.wait_for_restart()  # its beginning may be what ended the turn before
        self._started = time.monotonic()
        try:
            self._pool.require_usable()
            self._call()
        except Exception as error:  # the pool was stopped, or broke, meanwhile
            self._fail(type(error).__name__, str(error))
            return False
        return True

    def _fail(self, ename: str, evalue: str) -> None:
        """The same error for every rank of which nothing is known: mostly, nothing has run."""
        now = time.time()
        for rank in {*self.ranks} - {*self.replies, *self.errors}:
            sent = (self._payloads[rank].get("shipment") or {}).get("parcels", ())
            self._pool.variables.not_there(rank, [number for number, _ in sent])
            self.errors[rank] = RankError(rank, ename, evalue, "", now)

    def _watch(self) -> None:
        pending = set(self._futures)
        trouble_at: float | None = None  # since the first error, the interrupt or the time-out
        while pending:
            done, pending = wait(pending, timeout=0.05, return_when=FIRST_COMPLETED)
            now = time.monotonic()
            if self._timeout_s is not None and now - self._started > self._timeout_s:
                self._timed_out = not self._interrupted.is_set() or self._timed_out
                self._interrupted.set()
            for future in done:
                self._take(self._futures[future], future)
            if not pending or not (self.errors or self._interrupted.is_set()):
                continue
            trouble_at = trouble_at or now
            self._free(pending, now - trouble_at)
            if self._signalled_at is not None and now - self._signalled_at > REACT_S:
                self._give_up(pending)
                break
        self.elapsed_s = time.monotonic() - self._started

    def _free(self, pending: set[Future[Any]], since_s: float) -> None:
        """One rung of the ladder: SIGINT if the user wants out, abort after the grace."""
        if self._interrupted.is_set() and self._signalled_at is None:
            self._signalled_at = time.monotonic()
            self._pool.signal([self._futures[future] for future in pending])
        if since_s > GRACE_S and not self._aborted:
            self._aborted = True
            self._pool.abort_collectives(self.ranks)

    def _take(self, rank: int, future: Future[Any]) -> None:
        failure = future.exception()
        if failure is None and isinstance(future.result(), dict):
            self._group_wanting |= future.result().get("group_wanting", False)
            self._pool.variables.not_there(rank, future.result().get("lost", ()))
            if "names" in future.result():
                self.names[rank] = future.result()["names"]
        if failure is not None:  # the engine died, or did not run our function at all
            name = type(failure).__name__
            text = redact(str(failure), self._hidden)  # the end of a log may hold anything
            self.errors[rank] = RankError(rank, name, text, failed_at=time.time())
        elif "error" in future.result():
            error = dict(future.result()["error"])
            # no collective works any more after one has failed, also if nobody waits in it
            failed = error.get("collective") and error["ename"] not in _REFUSALS
            self._group_wanting = bool(self._group_wanting or failed)
            if "exception" in error:
                self._exceptions[rank] = error.pop("exception")
            self.errors[rank] = self._rank_error(rank, **error)
        else:
            reply = future.result()
            if reply.get("text"):
                reply = {**reply, "text": redact(reply["text"], self._hidden)}
            self.replies[rank] = reply

    def _rank_error(
        self,
        rank: int,
        ename: str,
        evalue: str,
        traceback: str,
        failed_at: float,
        where: str = "",
        collective: bool = False,
    ) -> RankError:
        freed = self._aborted and collective and bool(self.errors)
        # C++ code that is aborted raises its own error and not the interrupt that was meant
        interrupted = ename == "KeyboardInterrupt" or (
            self._interrupted.is_set() and self._aborted and collective and not freed
        )
        if interrupted and ename != "KeyboardInterrupt":
            ename, evalue = "KeyboardInterrupt", "in a collective"
        if interrupted and self._timed_out:
            late = f"took longer than {self._timeout_s:g} s"
            ename, evalue = "TimeoutError", f"{late}, {evalue}" if evalue else late
            traceback = traceback.replace("KeyboardInterrupt", "TimeoutError")
        return RankError(
            rank=rank,
            ename=ename,
            evalue=redact(evalue, self._hidden),
            traceback=redact(traceback, self._hidden),
            failed_at=failed_at,
            freed=freed,
            where=redact(where, self._hidden),
        )

    def _give_up(self, pending: set[Future[Any]]) -> None:
        ranks = sorted(self._futures[future] for future in pending)
        listed = ", ".join(map(str, ranks))
        reason = (
            f"rank {listed} did not react to the interrupt within {REACT_S:.0f} s (blocked in a "
            "collective, or in code that does not return to Python)"
        )
        for rank in ranks:
            self.errors[rank] = RankError(rank, "Unresponsive", reason, failed_at=time.time())
        self._pool.mark_broken(f"{reason}.", ranks)


def _title(name: str, payloads: Mapping[int, dict[str, Any]]) -> str:
    """What runs, in words."""
    number = next((p.get("cell_number") for p in payloads.values()), None)
    names = {"run_function": "a function", "train": "a training", "predict": "a prediction"}
    return f"cell In[{number}]" if number else names.get(name, "a cell")
