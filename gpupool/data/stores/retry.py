"""Tries again what a store has failed at, under a budget, and counts it. Runs anywhere; no torch.

counts.add(reads=1, bytes=60_000)         # in any thread
before = counts.snapshot()
...
print(counts.snapshot() - before)         # what happened in between
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from gpupool.core.progress import Progress

T = TypeVar("T")
_TOLD_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class Counts:
    """What this process has read. The difference of two is what happened between them.

    `reads` are files or ranges that came from a store, `bytes` what they held; `cached_reads` came
    from the cache instead; `retries` are tries that failed and were made again, `last_reason` why
    the last one was: "503 SlowDown", "" if there was none.
    """

    reads: int = 0
    bytes: int = 0
    retries: int = 0
    cached_reads: int = 0
    last_reason: str = ""

    def __sub__(self, before: Counts) -> Counts:
        retries = self.retries - before.retries
        return Counts(
            self.reads - before.reads,
            self.bytes - before.bytes,
            retries,
            self.cached_reads - before.cached_reads,
            self.last_reason if retries else "",
        )


class Counter:
    """Adds up `Counts`; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = dict.fromkeys((field.name for field in fields(Counts)[:-1]), 0)
        self._last_reason = ""
        # a child that is forked while another thread adds must not find it locked for ever
        os.register_at_fork(after_in_child=self._renew_lock)

    def add(
        self,
        *,
        reads: int = 0,
        bytes: int = 0,
        retries: int = 0,
        cached_reads: int = 0,
        reason: str = "",
    ) -> None:
        """Add to the counts; `reason` says why something was tried again."""
        with self._lock:
            total = self._total
            total["reads"] += reads
            total["bytes"] += bytes
            total["retries"] += retries
            total["cached_reads"] += cached_reads
            if reason:
                self._last_reason = reason

    def snapshot(self) -> Counts:
        """The counts since this process began."""
        with self._lock:
            return Counts(**self._total, last_reason=self._last_reason)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()


counts = Counter()
_chance = random.SystemRandom().random  # others seed Python's own, alike on all ranks


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to continue: no try begins `seconds` after the first; at most `tries` (None: any).

    The waits between them double from `first_wait_s` to `longest_wait_s`.
    """

    tries: int | None = None
    seconds: float = 60.0
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0

    def wait_s(self, failed: int, passed_s: float, chance: float) -> float | None:
        """How long to wait after so many failed tries and seconds; None: give up.

        `chance` in 0..1 spreads the waits of many threads from half to the whole of it.
        """
        wait = min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(failed - 1, 30))
        wait *= (1 + chance) / 2
        is_last = self.tries is not None and failed >= self.tries
        return None if is_last or passed_s + wait > self.seconds else wait

    def within(self, tries: int) -> Budget:
        """The same with so many tries at most."""
        return replace(self, tries=tries)


class _Notices:
    """Reports what is tried again for long, "reading (no connection)": one line for all threads."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)  # the threads are the parent's

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._tries: set[Tries] = set()
        self._line: Progress | None = None

    def begin(self, tries: Tries, what: str) -> None:
        """It has failed for a while, for the reason in `what`; report it until `end`."""
        with self._lock:
            left = self._line if all(one.is_over() for one in self._tries) else None
            if left is not None:  # of a training that is over
                left.close()
                self._line = None
            self._tries.add(tries)
            if self._line is None:
                self._line = Progress(what, elapsed_s=tries.passed_s, on_any_rank=True)
                self._line.start()

    def end(self, tries: Tries) -> None:
        """It has come to an end, well or not."""
        with self._lock:
            self._tries.discard(tries)
            line = self._line if not self._tries else None
            if line is not None:
                self._line = None
        if line is not None:
            line.close()


_notices = _Notices()
_under_way: set[Tries] = set()


class _Thread(threading.local):
    is_over: Callable[[], bool] = staticmethod(lambda: False)


_thread = _Thread()


def try_until(is_over: Callable[[], bool]) -> None:
    """What this thread wants of stores, nobody wants any more when `is_over()`."""
    _thread.is_over = is_over


def oldest() -> Tries | None:
    """Of what this process wants of stores just now, what it has wanted for longest."""
    wanted = [tries for tries in list(_under_way) if not tries.is_over()]
    return max(wanted, key=lambda tries: tries.passed_s, default=None)


class Tries:
    """The tries of one operation, in one thread; `doing` says what it does, in words."""

    def __init__(
        self,
        doing: str = "reading",
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._doing, self._clock, self._sleep = doing, clock, sleep
        self._began = clock()
        self._is_told = False
        self.is_over = _thread.is_over
        self.failed = 0
        self.reason = "no answer"
        """Why the last one failed; that nothing came, of the first."""

    @property
    def passed_s(self) -> float:
        """How long it has lasted."""
        return self._clock() - self._began

    def again(self, reason: str, budget: Budget) -> bool:
        """After a try that failed for `reason`: wait and say True, or False to give up."""
        self.failed += 1
        self.reason = reason
        wait = budget.wait_s(self.failed, self.passed_s, _chance())
        if wait is None or self.is_over():
            return False
        counts.add(retries=1, reason=reason)
        if self.passed_s > _TOLD_AFTER_S and not self._is_told:
            self._is_told = True
            _notices.begin(self, f"{self._doing} is tried again ({reason})")
        self._sleep(wait)
        return not self.is_over()

    def end(self) -> None:
        """There will be no other one."""
        if self._is_told:
            _notices.end(self)


class GaveUpError(Exception):
    """A fault that might have passed has not: `error` is the last one, `tries` what was done."""

    def __init__(self, error: Exception, tries: Tries) -> None:
        super().__init__(str(error))
        self.error = error
        self.tries = tries


def persist(
    operation: Callable[[], T],
    passes: Callable[[Exception], tuple[str, Budget] | None],
    doing: str = "reading",
) -> T:
    """What `operation` gives, tried again while `passes` says of its error that this may help.

    `passes` gives the reason in a few words and the budget, or None: then the error is raised.
    What lasts is reported, with `doing`: "reading is tried again (503 SlowDown)". Raises
    GaveUpError at the end of the budget.
    """
    tries = Tries(doing)
    _under_way.add(tries)
    try:
        while True:
            try:
                return operation()
            except Exception as error:
                passing = passes(error)
                if passing is None:
                    raise
                if not tries.again(*passing):
                    raise GaveUpError(error, tries) from None
    finally:
        _under_way.discard(tries)
        tries.end()
