"""Waits for what cannot be interrupted so that the waiting can be. Runs anywhere; no torch."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TypeVar

from gpupool.data.stores.retry import try_until

T = TypeVar("T")
_since: float | None = None  # when the training of this process began to wait for a batch


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


def waited_s() -> float | None:
    """How long a batch is being waited for; None if none is. From any thread."""
    since = _since
    return None if since is None else time.monotonic() - since


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
