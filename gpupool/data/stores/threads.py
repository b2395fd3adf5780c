"""Threads that an interrupt of the one that starts them cannot leave in a deadlock. Runs anywhere.

KeyboardInterrupt is raised between any two steps of the main thread, also just after one of
Python's own conditions has been taken and before what gives it back: `Thread.start` waits for one,
which the new thread then needs. So another thread, which no interrupt meets, starts them; the main
thread only gets from a queue that is written in C.
"""

from __future__ import annotations

import _thread
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

from gpupool.data.stores.retry import try_until

S = TypeVar("S")
T = TypeVar("T")
_AHEAD = 4  # for each thread: bounds what is done before it is asked for


def interruptible(operation: Callable[[], T]) -> T:
    """What `operation` gives or raises; in the main thread, an interrupt ends the waiting for it.

    There it runs in a thread of its own, which ends when the operation does: Python raises
    KeyboardInterrupt in the main thread alone, and not before a call into a library returns.
    """
    if threading.current_thread() is not threading.main_thread():
        return operation()
    is_left = False
    done: SimpleQueue[Future[T]] = SimpleQueue()

    def work() -> None:
        try_until(lambda: is_left)
        future: Future[T] = Future()
        try:
            future.set_result(operation())
        except BaseException as error:  # raised in the main thread
            future.set_exception(error)
        done.put(future)

    _thread.start_new_thread(work, ())
    try:
        return done.get().result()
    except BaseException:
        is_left = True
        raise


def start_threads(name: str, work: Callable[[], None], num: int = 1) -> list[threading.Thread]:
    """`num` threads that do `work`, started; daemons, so that none keeps the process alive.

    Raises RuntimeError if the system has no more threads.
    """

    def start() -> list[threading.Thread]:
        threads = [threading.Thread(target=work, name=name, daemon=True) for _ in range(num)]
        for thread in threads:
            thread.start()
        return threads

    return interruptible(start)


def in_threads(function: Callable[[S], T], items: Iterable[S], num: int) -> Iterator[T]:
    """`function` of each item, in order; of `num` at the same time, as most of them wait.

    What is still done when this is closed, nobody waits for.
    """
    is_over = threading.Event()
    pool = ThreadPoolExecutor(num, "gpupool-reading", try_until, (is_over.is_set,))
    under_way: deque[Future[T]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(function, item))
            if len(under_way) >= _AHEAD * num:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        # Not waiting: an interrupt must not hang on a store that does not answer.
        is_over.set()
        pool.shutdown(wait=False, cancel_futures=True)
