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

from gpupool.data.stores.retry import try_until

_JOIN_S = 2.0  # threads that have nothing to do end at once


def start_threads(name: str, works: Sequence[Callable[[], None]]) -> list[threading.Thread]:
    """A thread for each of `works`, started; daemons, so that none keeps the process alive.

    Raises RuntimeError if the system has no more threads.
    """
    started: SimpleQueue[list[threading.Thread] | BaseException] = SimpleQueue()

    def start() -> None:
        threads = [threading.Thread(target=work, name=name, daemon=True) for work in works]
        try:
            for thread in threads:
                thread.start()
            started.put(threads)
        except BaseException as error:  # raised again in the thread that asks
            started.put(error)

    _thread.start_new_thread(start, ())
    result = started.get()
    if isinstance(result, BaseException):
        raise result
    return result


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


def join_threads(threads: Sequence[threading.Thread], most_s: float = _JOIN_S) -> None:
    """Wait for threads that have nothing to do any more, at most two seconds unless given."""
    deadline = time.monotonic() + most_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
