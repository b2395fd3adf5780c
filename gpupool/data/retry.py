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
from dataclasses import dataclass, fields
from typing import TypeVar

T = TypeVar("T")


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
    """How long to go on: at most `tries`, none begun `seconds` after the first.

    The waits between them double from `first_wait_s` to `longest_wait_s`.
    """

    tries: int = 12
    seconds: float = 60.0
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0

    def wait_s(self, failed: int, passed_s: float, chance: float) -> float | None:
        """How long to wait after so many failed tries and seconds; None: give up.

        `chance` in 0..1 spreads the waits of many threads from half to the whole of it.
        """
        wait = min(self.longest_wait_s, self.first_wait_s * 2.0 ** (failed - 1))
        wait *= (1 + chance) / 2
        return wait if failed < self.tries and passed_s + wait <= self.seconds else None


class Tries:
    """The tries of one operation, in one thread."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._began = clock()
        self.failed = 0

    @property
    def passed_s(self) -> float:
        """How long it has gone on."""
        return self._clock() - self._began

    def again(self, reason: str, budget: Budget) -> bool:
        """After a try that failed for `reason`: wait and say True, or False to give up."""
        self.failed += 1
        wait = budget.wait_s(self.failed, self.passed_s, _chance())
        if wait is None:
            return False
        counts.add(retries=1, reason=reason)
        self._sleep(wait)
        return True


class GaveUpError(Exception):
    """A fault that might have passed has not: `error` is the last one, `tries` what was done."""

    def __init__(self, error: Exception, tries: Tries) -> None:
        super().__init__(str(error))
        self.error = error
        self.tries = tries


def persist(
    operation: Callable[[], T], passes: Callable[[Exception], tuple[str, Budget] | None]
) -> T:
    """What `operation` gives, tried again while `passes` says of its error that this may help.

    `passes` gives the reason in a few words and the budget, or None: then the error is raised.
    Raises GaveUpError at the end of the budget.
    """
    tries = Tries()
    while True:
        try:
            return operation()
        except Exception as error:
            passing = passes(error)
            if passing is None:
                raise
            if not tries.again(*passing):
                raise GaveUpError(error, tries) from None
