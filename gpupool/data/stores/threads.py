"""Threads that an interrupt of the one that starts them cannot leave in a deadlock. Runs anywhere.

KeyboardInterrupt is raised between any two steps of the main thread, also just after one of
Python's own conditions has been taken and before what gives it back: `Thread.start` waits for one,
which the new thread then needs. So another thread, which no interrupt meets, starts them; the main
thread only gets from a queue that is written in C.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

from gpupool.data.stores.retry import try_until

T = TypeVar("T")


def interruptible(operation: Callable[[], T]) -> T:
    """What `operation` gives or raises; in the main thread, an interrupt ends the waiting for it.

    There it runs in a thread of its own, which ends when the operation does: Python raises
    KeyboardInterrupt in the main thread alone, and not before a call into a library returns.
    """
    if threading.current_thread() is not threading.main_thread():
        return operation()
    is_left = threading.Event()
    done: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try_until(is_left.is_set)
        try:
            done.put((operation(), None))
        except BaseException as error:  # raised in the main thread
            done.put((None, error))

    _thread.start_new_thread(work, ())
    try:
        value, error = done.get()
    except BaseException:
        is_left.set()
        raise
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # None only if that is what it gave


def start_threads(name: str, works: Sequence[Callable[[], None]]) -> list[threading.Thread]:
    """A thread for each of `works`, started; daemons, so that none keeps the process alive.

    Raises RuntimeError if the system has no more threads.
    """

    def start() -> list[threading.Thread]:
        threads = [threading.Thread(target=work, name=name, daemon=True) for work in works]
        for thread in threads:
            thread.start()
        return threads

    return interruptible(start)


@contextmanager
def reading_threads(num: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Up to `num` threads for what waits. What they still do after the block nobody waits for."""
    is_over = threading.Event()
    pool = ThreadPoolExecutor(num, name, try_until, (is_over.is_set,))
    try:
        yield pool
    finally:
        # Not waiting: an interrupt must not hang on a store that does not answer.
        is_over.set()
        pool.shutdown(wait=False, cancel_futures=True)


def join_threads(threads: Sequence[threading.Thread], most_s: float) -> None:
    """Wait for their end, but no longer."""
    deadline = time.monotonic() + most_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
