"""Presses of the stop button that mean nothing new. Runs on the client.

They do nothing in other threads, nor where the user's code handles SIGINT itself.
"""

from __future__ import annotations

import math
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
    if _is_ours_to_change():
        # In a kernel this lasts until the end of the cell, when ipykernel puts its own back.
        signal.signal(signal.SIGINT, _Handler(deaf_until=time.monotonic() + SAME_WISH_S))


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
    with _Handler(signal.getsignal(signal.SIGINT), deaf_until=math.inf):
        yield


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
    with _Handler(signal.getsignal(signal.SIGINT), on_press):
        yield


class _Handler:
    """A handler of SIGINT that is deaf until a time; then it passes presses on, or is over.

    Each press that it passes on makes it deaf for a second.
    """

    def __init__(
        self,
        before: Any = signal.default_int_handler,
        on_press: Callable[[bool], object] | None = None,
        deaf_until: float = 0.0,
    ) -> None:
        self._before = before
        self._on_press = on_press
        self._deaf_until = deaf_until
        self._is_first = True

    @property
    def is_deaf(self) -> bool:
        """Whether it passes nothing on, and stands for Python's own."""
        return self._on_press is None and self._deaf_until > 0

    def __enter__(self) -> None:
        signal.signal(signal.SIGINT, self)

    def __exit__(self, *_: object) -> None:
        self._on_press, self._deaf_until = None, 0.0
        current: object = signal.getsignal(signal.SIGINT)
        if current is self:
            signal.signal(signal.SIGINT, self._before)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now < self._deaf_until:
            return
        if self._on_press is None:  # another cell, begun meanwhile, may have put it back after us
            self.__exit__()
            if callable(self._before):
                self._before(number, frame)
            return
        is_first, self._is_first = self._is_first, False
        self._deaf_until = now + SAME_WISH_S
        self._on_press(is_first)


def _is_ours_to_change() -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    handler: Any = signal.getsignal(signal.SIGINT)
    is_deaf = isinstance(handler, _Handler) and handler.is_deaf
    return handler is signal.default_int_handler or is_deaf
