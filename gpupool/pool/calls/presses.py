"""Presses of the stop button that mean nothing new. Runs on the client.

They do nothing in other threads, nor where the user's code handles SIGINT itself.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SAME_WISH_S = 1.0


def ignore_for_a_moment() -> None:
    """An interrupt has been heard: those of the next second mean the same, and do nothing.

    A second one would else meet the end of the cell, where it costs the picture of what happened,
    or (ipykernel, while it sends its reply) leaves the cell without an end.
    """
    if not _is_ours_to_change():
        return
    # In a kernel this lasts until the end of the cell, when ipykernel puts its own back.
    signal.signal(signal.SIGINT, _Deaf(time.monotonic() + SAME_WISH_S))


def heed_again() -> None:
    """Something new begins: a press means that, however soon it comes after the last one."""
    if _is_ours_to_change() and isinstance(signal.getsignal(signal.SIGINT), _Deaf):
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def ignored() -> Iterator[None]:
    """A block that no interrupt cuts off; for what is over soon and must not be done by halves."""
    if not _is_ours_to_change():
        yield
        return
    before = signal.signal(signal.SIGINT, _Deaf(float("inf")))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def heard_by(on_press: Callable[[bool], object]) -> Iterator[None]:
    """A block in which SIGINT means `on_press(is_first)` and nothing else.

    In one that awaits, IPython would else cancel the cell, and the interrupt would cost what it
    waits for. `on_press` is called in the middle of anything: it may set an event that the block
    does not use, or have an event loop do something.
    Presses within a second of the last one that counted mean the same, and are not passed on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Listener(on_press, signal.getsignal(signal.SIGINT))
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        handler.put_back()


class _Listener:
    """A handler of SIGINT that passes presses on until it has been put back."""

    def __init__(self, on_press: Callable[[bool], object], before: Any) -> None:
        self._on_press: Callable[[bool], object] | None = on_press
        self._before = before
        self._heard_at: float | None = None

    def put_back(self) -> None:
        """Hear no more, and give the place back to the former handler."""
        self._on_press = None
        current: object = signal.getsignal(signal.SIGINT)
        if current is self and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._on_press is None:  # another cell, begun meanwhile, has put this one back after us
            self.put_back()
            if callable(self._before):
                self._before(number, frame)
            return
        now = time.monotonic()
        if self._heard_at is None or now - self._heard_at >= SAME_WISH_S:
            is_first, self._heard_at = self._heard_at is None, now
            self._on_press(is_first)


class _Deaf:
    """A handler of SIGINT that does nothing until a time, and then is as Python's own."""

    def __init__(self, until: float) -> None:
        self._until = until

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() >= self._until:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.default_int_handler(number, frame)


def _is_ours_to_change() -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    handler: Any = signal.getsignal(signal.SIGINT)
    return handler is signal.default_int_handler or isinstance(handler, _Deaf)
