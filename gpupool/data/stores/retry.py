"""Tries again what a store has failed at, says so if it lasts, and counts it. Runs anywhere.

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
from dataclasses import dataclass

from gpupool.core.progress import Progress

_TOLD_AFTER_S = 2.0
_LONGEST_WAIT_S = 5.0


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
        self._total = Counts()

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
        with _lock:
            old = self._total
            self._total = Counts(
                old.reads + reads,
                old.bytes + bytes,
                old.retries + retries,
                old.cached_reads + cached_reads,
                reason or old.last_reason,
            )

    def snapshot(self) -> Counts:
        """The counts since this process began."""
        return self._total


class _Thread(threading.local):
    is_over: Callable[[], bool] = staticmethod(lambda: False)


_lock = threading.Lock()
_line_lock = threading.Lock()
_thread = _Thread()
counts = Counter()
_under_way: set[Tries] = set()
_line: Progress | None = None  # says what is tried again: one for all threads
_chance = random.SystemRandom().random  # others seed Python's own, alike on all ranks


def _forget() -> None:
    """The threads are the parent's, which may have taken the locks."""
    global _lock, _line_lock, _line
    _lock, _line_lock, _line = threading.Lock(), threading.Lock(), None
    _under_way.clear()


os.register_at_fork(after_in_child=_forget)


def try_until(is_over: Callable[[], bool]) -> None:
    """What this thread wants of stores, nobody wants any more when `is_over()`."""
    _thread.is_over = is_over


def oldest() -> Tries | None:
    """Of what this process wants of stores just now, what it has wanted for longest."""
    wanted = [tries for tries in list(_under_way) if not tries.is_over()]
    return max(wanted, key=lambda tries: tries.passed_s, default=None)


class Tries:
    """The tries of one operation, in one thread; `doing` says what it does, in words.

    What lasts is shown from within a `with` of it: "reading is tried again (503 SlowDown)".
    """

    def __init__(self, doing: str) -> None:
        self.is_over = _thread.is_over
        self.failed = 0
        self.reason = "no answer"
        """Why the last one failed; that nothing came, of the first."""
        self._doing = doing
        self._is_told = False
        self._began = time.monotonic()

    @property
    def passed_s(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._began

    def __enter__(self) -> Tries:
        _under_way.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _under_way.discard(self)
        if self._is_told:
            _show_line()

    def again(self, reason: str, seconds: float) -> bool:
        """After a try that failed for `reason`: wait and say True, or False to give up.

        No try begins later than `seconds` after the first; AWS_MAX_ATTEMPTS bounds their number.
        """
        self.failed += 1
        self.reason = reason
        # the waits of many threads are spread from half to the whole of it
        wait_s = min(_LONGEST_WAIT_S, 0.1 * 2.0 ** min(self.failed - 1, 10)) * (1 + _chance()) / 2
        most = os.environ.get("AWS_MAX_ATTEMPTS", "")
        is_last = most.isdecimal() and self.failed >= int(most)
        if is_last or self.passed_s + wait_s > seconds or self.is_over():
            return False
        counts.add(retries=1, reason=reason)
        if self.passed_s > _TOLD_AFTER_S and not self._is_told:
            self._is_told = True
            _show_line(self)
        time.sleep(wait_s)
        return not self.is_over()

    def begin_line(self) -> Progress:
        """What shows it."""
        what = f"{self._doing} is tried again ({self.reason})"
        line = Progress(what, elapsed_s=self.passed_s, on_any_rank=True)
        line.start()
        return line


def _show_line(new: Tries | None = None) -> None:
    """Begin the line, unless there is one; end it where nothing is tried for long any more."""
    global _line
    with _line_lock:
        if any(tries._is_told and not tries.is_over() for tries in list(_under_way)):
            if _line is None and new is not None:
                _line = new.begin_line()
        elif _line is not None:
            _line.close()
            _line = None
