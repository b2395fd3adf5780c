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

SAME_WISH_S = 1.0
_deaf_until = 0.0


def ignore_for_a_moment() -> None:
    """An interrupt has been heard: those of the next second mean the same, and do nothing.

    A second one would else meet the end of the cell, where it costs the picture of what happened,
    or (ipykernel, while it sends its reply) leaves the cell without an end.
    """
    global _deaf_until
    if _is_ours_to_change():
        _deaf_until = time.monotonic() + SAME_WISH_S
        # In a kernel this lasts until the end of the cell, when ipykernel puts its own back.
        signal.signal(signal.SIGINT, _unless_deaf)


def heed_again() -> None:
    """Something new begins: a press means that, however soon it comes after the last one."""
    if _is_ours_to_change():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def ignored() -> Iterator[None]:
    """A block that no interrupt cuts off; for what is over soon and must not be done by halves."""
    if not _is_ours_to_change():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    before, is_over, heard_at = signal.getsignal(signal.SIGINT), False, 0.0

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal heard_at
        if is_over:  # another cell, begun meanwhile, has put it back after us
            signal.signal(signal.SIGINT, before)
            if callable(before):
                before(number, frame)
        elif time.monotonic() - heard_at > SAME_WISH_S:
            is_first, heard_at = not heard_at, time.monotonic()
            on_press(is_first)

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        is_over = True
        if signal.getsignal(signal.SIGINT) is hear:
            signal.signal(signal.SIGINT, before)


def _unless_deaf(number: int, frame: FrameType | None) -> None:
    """In the place of Python's own handler, after a press."""
    if time.monotonic() >= _deaf_until:
        signal.default_int_handler(number, frame)


def _is_ours_to_change() -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _unless_deaf)
