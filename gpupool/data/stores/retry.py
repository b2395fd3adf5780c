"""Tries again what a store has failed at, says so if it lasts, and counts it; and what this process
waits for just now. Runs anywhere."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from gpupool.core.progress import Progress

T = TypeVar("T")
_TOLD_AFTER_S = 2.0
_LONGEST_WAIT_S = 5.0


@dataclass
class Counts:
    """What was read. The difference of two is what happened between them.

    `reads` are files or ranges that came from a store, not from the cache; `last_reason` says why
    something was tried again last: "503 SlowDown".
    """

    reads: int = 0
    retries: int = 0
    cached_reads: int = 0
    last_reason: str = ""

    def add(self, reason: str = "", **more: int) -> None:
        """Add to them, in any thread."""
        with _lock:
            for name, number in more.items():
                setattr(self, name, getattr(self, name) + number)
            self.last_reason = reason or self.last_reason

    def snapshot(self) -> Counts:
        with _lock:
            return replace(self)

    def __sub__(self, before: Counts) -> Counts:
        return Counts(
            self.reads - before.reads,
            self.retries - before.retries,
            self.cached_reads - before.cached_reads,
            self.last_reason if self.retries > before.retries else "",
        )


counts = Counts()
"""Those of this process since it began."""
_lock = threading.Lock()
_thread = threading.local()
_under_way: set[Tries] = set()
_one_line = threading.Lock()  # held by the Tries that say so
_since: float | None = None  # when the training began to wait for a batch


def _forget() -> None:
    """In a forked process: the threads are the parent's, and one may have the lock."""
    global _lock, _one_line
    _lock, _one_line = threading.Lock(), threading.Lock()
    _under_way.clear()


os.register_at_fork(after_in_child=_forget)


def try_until(is_over: Callable[[], bool]) -> None:
    """What this thread wants of stores, nobody wants any more when `is_over()`."""
    _thread.is_over = is_over


def awaited(batches: Iterator[T]) -> Iterator[T]:
    """The same batches; `waited_s` is how long the consumer has waited for the next one."""
    global _since
    while True:
        _since = time.monotonic()
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            _since = None
        yield batch


def waited_s() -> float:
    """How long a batch is being waited for; 0 if none is. From any thread."""
    since = _since
    return 0.0 if since is None else time.monotonic() - since


def oldest() -> Tries | None:
    """Of what this process wants of stores just now, what it has wanted for longest."""
    wanted = [tries for tries in list(_under_way) if not tries.is_over()]
    return max(wanted, key=lambda tries: tries.passed_s, default=None)


class Tries:
    """The tries of one operation, in one thread; `doing` says what it does, in words.

    What lasts is shown from within a `with` of it: "reading is tried again (503 SlowDown)".
    """

    def __init__(self, doing: str) -> None:
        self.is_over: Callable[[], bool] = getattr(_thread, "is_over", lambda: False)
        self.failed = 0
        self.reason = "no answer"  # so far; then why the last one failed
        self.doing = doing
        self._line: Progress | None = None
        self._began = time.monotonic()

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._began

    def __enter__(self) -> Tries:
        _under_way.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _under_way.discard(self)
        if self._line is not None:
            self._line.close()
            _one_line.release()

    def again(self, reason: str, seconds: float) -> bool:
        """After a try that failed for `reason`: wait and say True, or False to give up.

        No try begins later than `seconds` after the first; AWS_MAX_ATTEMPTS bounds their number.
        """
        self.failed += 1
        self.reason = reason
        # Others seed Python's own generator, alike on all ranks; these are to wait differently.
        share = random.SystemRandom().uniform(0.5, 1)
        wait_s = share * min(_LONGEST_WAIT_S, 0.1 * 2.0 ** min(self.failed - 1, 10))
        most = os.environ.get("AWS_MAX_ATTEMPTS", "")
        is_last = most.isdecimal() and self.failed >= int(most)
        if is_last or self.passed_s + wait_s > seconds or self.is_over():
            return False
        counts.add(reason, retries=1)
        if self.passed_s > _TOLD_AFTER_S and _one_line.acquire(blocking=False):
            what = f"{self.doing} is tried again ({reason})"
            self._line = Progress(what, elapsed_s=self.passed_s, on_any_rank=True)
            self._line.start()
        time.sleep(wait_s)
        return not self.is_over()
