"""The call that this rank serves, and interrupts that are meant for it. Runs on engines.

An interrupt names the call it is meant for and is sent over the control channel: one that comes
too late, because the call has ended by itself, must not meet the next one.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

_current: int | None = None
_lock = threading.Lock()


def serve(number: int, work: Callable[..., Any], payload: Mapping[str, Any]) -> Any:
    """What `work(**payload)` returns; until then `interrupt(number)` ends it."""
    global _current
    with _lock:
        _current = number
    reply = None
    try:
        try:
            reply = work(**payload)
        finally:
            over()
    except KeyboardInterrupt:  # it has struck between the work and here
        if reply is None:
            raise
    return reply


def interrupt(number: int | None) -> bool:
    """Raise KeyboardInterrupt in the main thread if this call runs (None: whichever does).

    For another thread. Tells whether it does. Also wakes a thread that sleeps or reads.
    """
    main = threading.main_thread().ident
    with _lock:
        if _current is None or main is None or number not in (None, _current):
            return False
        signal.pthread_kill(main, signal.SIGINT)
        return True


def over() -> None:
    """The user's code of this call has ended: an interrupt has nothing to interrupt any more."""
    global _current
    if _current is None or threading.current_thread() is not threading.main_thread():
        return
    # One that is on its way strikes while the handler is exchanged, or never.
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, _ignore)
    signal.signal(signal.SIGINT, _ignore)
    with _lock:
        _current = None


def _ignore(number: int, frame: FrameType | None) -> None:
    """Nothing; ipykernel puts its own handler back when the request has been answered."""
