"""Threads that an interrupt of the one that starts them cannot leave in a deadlock. Runs anywhere.

KeyboardInterrupt is raised between any two steps of the main thread, also just after one of
Python's own conditions has been taken and before what gives it back: `Thread.start` waits for one,
which the new thread then needs. So another thread, which no interrupt meets, starts them; the main
thread only puts into queues and gets from them, which are written in C. All are daemons: a store
that never answers keeps no process alive.
"""

from __future__ import annotations

import _thread
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar, cast

from gpupool.data.stores.retry import try_until

S = TypeVar("S")
T = TypeVar("T")
Task = Callable[[], object]
NAME = "gpupool-reading"


class Outcome(NamedTuple, Generic[T]):
    """What an operation has given, or raised: `result` gives or raises that in another thread.

    It takes a fifth of the time of a `Future`, and each sample that is read has two.
    """

    value: T | None
    error: BaseException | None = None

    @classmethod
    def of(cls, operation: Callable[[], T]) -> Outcome[T]:
        try:
            return cls(operation())
        except BaseException as error:
            return cls(None, error)

    def result(self) -> T:
        try:
            if self.error is not None:
                raise self.error
            return cast(T, self.value)
        finally:
            del self  # a traceback holds this frame


class Threads:
    """Threads that do what they are given, in that order, until `close`."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._is_closed = False

    def start(self, num: int, begin: Task = lambda: None) -> list[threading.Thread]:
        """Start `num` of them, each of which calls `begin` first."""
        started: SimpleQueue[Outcome[list[threading.Thread]]] = SimpleQueue()

        def work() -> None:
            begin()
            try_until(lambda: self._is_closed)
            while (task := self._tasks.get()) is not None and not self._is_closed:
                task()
                del task
            self._tasks.put(None)  # for the next one

        def start() -> list[threading.Thread]:
            threads = [threading.Thread(None, work, NAME, daemon=True) for _ in range(num)]
            for thread in threads:
                thread.start()
            return threads

        _thread.start_new_thread(lambda: started.put(Outcome.of(start)), ())
        return started.get().result()

    def do(self, task: Task) -> None:
        """Have one of them do this, which raises nothing."""
        self._tasks.put(task)

    def close(self) -> None:
        """End them: those that wait for work at once, others when they come back."""
        self._is_closed = True
        self._tasks.put(None)


def in_threads(
    function: Callable[[S], T], items: Iterable[S], num: int, ahead: int = 4
) -> Generator[T, None, None]:
    """`function` of each item, in order; of `num` at the same time, as most of them wait.

    `ahead`, for each thread, bounds what is done before it is asked for. What is still done when
    this is closed, nobody waits for.
    """
    threads, under_way = Threads(), deque[SimpleQueue[Outcome[T]]]()

    def do(item: S, answer: SimpleQueue[Outcome[T]]) -> None:
        answer.put(Outcome.of(partial(function, item)))

    try:
        threads.start(num)
        for item in items:
            under_way.append(SimpleQueue())
            threads.do(partial(do, item, under_way[-1]))
            if len(under_way) >= ahead * num:
                yield under_way.popleft().get().result()
        while under_way:
            yield under_way.popleft().get().result()
    finally:
        threads.close()


def interruptible(operation: Callable[[], T]) -> T:
    """What `operation` gives or raises; in the main thread, an interrupt ends the waiting for it.

    There it runs in a thread of its own: Python raises KeyboardInterrupt in the main thread alone,
    and not before a call into a library returns.
    """
    if threading.current_thread() is not threading.main_thread():
        return operation()
    return next(in_threads(lambda _: operation(), [None], 1))
