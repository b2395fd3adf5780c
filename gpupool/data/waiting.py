"""Waits for what cannot be interrupted so that the waiting can be. Runs anywhere; no torch."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def interruptible(operation: Callable[[], T]) -> T:
    """What `operation` gives or raises; in the main thread, an interrupt ends the waiting for it.

    There it runs in a thread of its own, which ends when the operation does: Python raises
    KeyboardInterrupt in the main thread alone, and not before a call into a library returns.
    """
    if threading.current_thread() is not threading.main_thread():
        return operation()
    done: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            done.put((operation(), None))
        except BaseException as error:  # raised in the main thread
            done.put((None, error))

    _thread.start_new_thread(work, ())
    value, error = done.get()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # None only if that is what it gave
