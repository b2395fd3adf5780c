"""One engine function on several ranks at once: wait, free the blocked. Runs on the client.

A background thread supervises each execution, so that the caller's thread only waits for an event
and hears the user's interrupt at once. When a rank fails or the user interrupts while others still
run, these are interrupted and asked to abort their collectives (`freeing.py` says when): nobody
waits for a peer that does not come. The pool then forms the group again.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, Generic

from gpupool.core.errors import EngineDiedError, RankError, SpmdError
from gpupool.core.wire.calls import BoundCall, Call, RunTask, torch_settings
from gpupool.core.wire.masking import redact
from gpupool.core.wire.output import OnOutput
from gpupool.core.wire.replies import CodeReply, Raised, Reply, Value
from gpupool.core.wire.values import NamesReport
from gpupool.pool.calls.diagnosis import HangWatch
from gpupool.pool.calls.failures import HANG, masked, resolve, without_reply
from gpupool.pool.calls.freeing import Freeing
from gpupool.pool.calls.presses import heed_again, ignore_for_a_moment
from gpupool.pool.environment.own_modules import reloaded
from gpupool.pool.launchers.starter import uninterrupted
from gpupool.pool.notices import NoticeLines, OnNotice
from gpupool.pool.ranks import Ranks

_UNFINISHED = (
    "Collectives were aborted, and GPUs compute behind. Tensors that the cell has changed may hold "
    "unfinished numbers on every rank: gradients, and with them the weights of a DDP loop. Load a "
    "checkpoint, or make them again."
)
_FORM_S = 5.0  # for the group to be formed again
_numbers = itertools.count(1)


class Execution(Generic[Value]):
    """One kind of call that runs on several ranks: rank -> its call.

    `number` is by what the pool and its ranks know it. Of ranks that have finished there is a value
    in `values`, or one of `errors`; `names` is what a cell has left, also where it failed. While it
    waits its turn on ranks that are in use, `waits_for` names what runs there.

    It runs in a thread of its own; a task in that which calls `run`. `on_notice` hears what the
    user should know meanwhile; without it that is on stderr.

    Raises:
        PoolError: nothing can run on the ranks.
    """

    def __init__(
        self,
        all_ranks: Ranks,
        calls: Mapping[int, Call[Value]],
        on_output: OnOutput,
        timeout_s: float | None = None,
        on_notice: OnNotice | None = None,
        keeps: object = None,
    ) -> None:
        all_ranks.wait_until_usable()
        heed_again()
        self.ranks, self.number = tuple(calls), next(_numbers)
        self.values: dict[int, Value] = {}
        self.errors: dict[int, RankError] = {}
        self.names: dict[int, NamesReport] = {}
        self.started_at, self.elapsed_s = time.monotonic(), 0.0
        self._keeps = keeps  # what has to live until the end of this
        self.ends_well: Callable[[], None] | None = None  # of a training: asks it to, once
        # one has no part in the process group, whatever becomes of it
        self.is_task = any(isinstance(call, RunTask) for call in calls.values())
        again, settings = reloaded(), torch_settings()
        self._calls = {
            rank: replace(one, number=self.number, reloaded=again, torch_settings=settings)
            for rank, one in calls.items()
        }
        self._all_ranks, self._hidden = all_ranks, all_ranks.secrets
        self._on_output, self._timeout_s = on_output, timeout_s
        self._on_notice: OnNotice = NoticeLines() if on_notice is None else on_notice
        self._noticed: str | None = None
        self._futures: dict[Future[Reply[Value]], int] = {}
        self._failures: dict[int, Raised] = {}
        self._limit: tuple[str, str] | None = None  # what has ended it: name of the error, words
        self._presses = 0  # how often the end was asked for
        self._finished = threading.Event()
        self._freeing = Freeing(all_ranks, self.ranks, self.number, self._notice, self.is_task)
        self._watch = HangWatch(all_ranks, self.ranks)
        self._broken: list[int] = []  # ranks that have lost their GPU context, and were killed
        self._lags = False  # a device may have more to compute, with half a sum perhaps
        self._group_wanting = False  # the process group was left, or has failed
        all_ranks.supervised[self.number] = self
        title = next((call.title for call in calls.values()), "")
        try:
            with uninterrupted():  # without its thread it would stay in the row for ever
                self._turn = all_ranks.turns.ask(calls, title, "task" if self.is_task else "")
                self.waits_for = all_ranks.turns.begin(self._turn)
                if not self.is_task:
                    name = "gpupool-execution"
                    threading.Thread(target=self.run, name=name, daemon=True).start()
        except KeyboardInterrupt:
            self.interrupt()
            raise

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, at most `timeout_s`; returns whether it has come."""
        return self._finished.wait(timeout_s)

    def error(self) -> SpmdError | None:
        """The errors so far as one, if there are any."""
        if not self.errors:
            return None
        ranks = self._all_ranks.placement.ranks
        errors = {n: replace(one, host=ranks[n].host) for n, one in self.errors.items()}
        return SpmdError(errors, len(self.ranks))

    def states(self) -> dict[int, str]:
        """What each rank does as far as is known: "running", "in all_reduce" or "done".

        Those that run are asked once a second, from the third second on.
        """
        states = dict.fromkeys(self.ranks, "running")
        for rank, where in self._watch.where.items():
            if rank in states and where.doing:
                states[rank] = f"in {where.doing}"
        return states | dict.fromkeys((*self.values, *self._failures), "done")

    def interrupt(self) -> None:
        """Interrupt the ranks that still run; returns at once. May be called again."""
        self._presses += 1

    def result(
        self,
        tick: Callable[[], None] = lambda: None,
        on_interrupt: Callable[[], None] | None = None,
    ) -> dict[int, Value]:
        """The values by rank, after waiting for them. Ctrl-C meanwhile interrupts the ranks.

        Args:
            tick: called every 0.1 s while waiting, in this thread.
            on_interrupt: called at Ctrl-C instead.

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
                (on_interrupt or self.interrupt)()
        error = self.error()
        if error is not None:
            raise error
        return self.values

    # ---- in the supervising thread -------------------------------------------------------

    def run(self, tick: Callable[[], None] = lambda: None) -> None:
        """Run it, and return when it has ended; `tick` is called now and then."""
        try:
            self._begin()
            self._wait_for_ranks(tick)
        except (Exception, KeyboardInterrupt) as error:  # whoever waits has to hear of it
            self._fail(error)
        finally:
            self._notice(None)
            if self.errors and self._futures:
                self._all_ranks.last_error = self.error()
            self._keeps = self.ends_well = None
            try:
                if self._group_wanting:
                    self._all_ranks.reform_group()
                self._all_ranks.turns.end(self._turn)
                # Forming takes half a second with 32 ranks. An error is reported before it, and the
                # next call waits. Not so after a stop: people press twice, and the second press
                # would meet the end of the cell, where an `await` has no handler of ours.
                if self._presses:
                    self._all_ranks.wait_until_mended(_FORM_S)
            finally:
                self._finished.set()

    def _begin(self) -> None:
        if self.waits_for:
            while self.waits_for and not self._presses:
                self.waits_for = self._all_ranks.turns.begin(self._turn, 0.05)
            if self.waits_for:
                names = ", ".join(self.waits_for)
                raise KeyboardInterrupt(f"interrupted while it waited for {names}")
            # A task waits for no other rank, and hears of its own when it is called.
            if not self.is_task or self._all_ranks.trouble.kind != "replacing":
                self._all_ranks.require_usable()
            self.started_at = time.monotonic()
        engines, carrier = self._all_ranks.engines, self._all_ranks.carrier
        for rank, call in self._calls.items():
            try:
                call = carrier.localized(rank, call, lambda: self._presses > 0)
                self._futures[engines.call(rank, call, self._on_output)] = rank
            # it could not be sent; ranks that have theirs are freed
            except (Exception, KeyboardInterrupt) as error:
                self._note(rank, error)

    def _fail(self, error: BaseException) -> None:
        """The same error for every rank of which nothing is known: mostly, nothing has run."""
        for rank in {*self.ranks} - {*self.values, *self.errors}:
            call = self._calls[rank]
            if isinstance(call, BoundCall) and call.bindings is not None:
                sent = call.bindings.values.parcels
                self._all_ranks.on_lost(rank, [number for number, _ in sent])
            self.errors[rank] = without_reply(rank, error, self._hidden).error

    def _wait_for_ranks(self, tick: Callable[[], None]) -> None:
        pending = set(self._futures)
        while pending:
            tick()
            done, pending = wait(pending, timeout=0.05, return_when=FIRST_COMPLETED)
            now = time.monotonic()
            ranks = sorted(self._futures[future] for future in pending)
            for future in done:
                self._take(self._futures[future], future)
            if pending and not (self._failures or self._presses):
                self._look(now)
            if pending and (self._failures or self._presses):
                self._freeing.step(now, self._presses, ranks)
                if failed := self._freeing.given_up(now, ranks):
                    self._failures.update(failed)
                    break
        self.elapsed_s = time.monotonic() - self.started_at
        # Else the next cell would begin on a process that is just ending.
        self._all_ranks.group.wait_until_gone(self._broken)
        self._group_wanting |= self._freeing.has_aborted
        if self._failures and not (self._group_wanting or self.is_task):
            self._group_wanting = not self._all_ranks.group.is_in_step(self.ranks)
        self._resolve()

    def _resolve(self) -> None:
        for rank, failure in self._failures.items():
            said = failure.error.evalue
            error = replace(failure.error, evalue=said + self._all_ranks.hint(rank, said))
            self._failures[rank] = replace(failure, error=error)
        resolved = resolve(
            self._failures,
            asked=bool(self._presses),
            limit=self._limit,
            freed_at=self._freeing.freed_at,
            where=self._watch.where | self._freeing.where,
        )
        if self._lags and self._group_wanting and resolved:
            first = SpmdError(resolved, len(self.ranks)).first
            hint = "\n".join(filter(None, [first.hint, _UNFINISHED]))
            resolved[first.rank] = replace(first, hint=hint)
        self.errors.update(resolved)

    def _look(self, now: float) -> None:
        """Ask for the end if the time is over, or for a hang if that is wanted; else report it."""
        if self._timeout_s is not None and now - self.started_at > self._timeout_s:
            self._limit = "TimeoutError", f"took longer than {self._timeout_s:g} s"
            self.interrupt()
            return
        values = self.values.items()
        left = [rank for rank, value in values if isinstance(value, CodeReply) and value.left]
        diagnosis = self._watch.look(self.values, now, left)
        self._notice(None if diagnosis is None or diagnosis.by_exit else diagnosis)
        ends = self._all_ranks.options.on_hang == "abort"
        if diagnosis is not None and diagnosis.is_hang and (ends or diagnosis.by_exit):
            self._limit = HANG, diagnosis.finding
            self.interrupt()

    def _notice(self, text: str | None) -> None:
        if text != self._noticed:
            self._noticed = text
            self._on_notice(text)

    def _note(self, rank: int, error: BaseException) -> None:
        self._failures[rank] = without_reply(rank, error, self._hidden)
        self._group_wanting |= isinstance(error, EngineDiedError)

    def _take(self, rank: int, future: Future[Reply[Value]]) -> None:
        if (error := future.exception()) is not None:
            self._note(rank, error)
            return
        reply = future.result()
        self._group_wanting |= reply.group_wanting
        self._lags |= reply.lags
        self._all_ranks.on_lost(rank, reply.lost)
        if reply.names is not None:
            self.names[rank] = reply.names
        if reply.raised is None:
            value: Any = reply.value
            if isinstance(value, CodeReply) and value.text:  # which is going to be shown
                value = replace(value, text=redact(value.text, self._hidden))
            self.values[rank] = value
            return
        self._failures[rank] = failure = masked(reply.raised, self._hidden)
        if reply.context_lost:
            self._all_ranks.engines.kill(rank, "had lost its GPU context, and was ended")
            self._broken.append(rank)
        # no collective works any more after one has failed, also if nobody waits in it
        self._group_wanting |= failure.collective
