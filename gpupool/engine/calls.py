"""The call that this rank serves, and interrupts that are meant for it. Runs on engines.

An interrupt names the call it is meant for and is sent over the control channel: one that comes
too late, because the call has ended by itself, must not meet the next one.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from gpupool.engine.places import LIBRARIES

_POLL_S = 0.02
_STUB = str(Path(__file__).parent.parent / "core" / "invoke.py")  # under every call

_current: int | None = None
_waiting: int | None = None  # the call that is interrupted when its import has ended
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


def interrupt(number: int | None) -> None:
    """Raise KeyboardInterrupt in the main thread if this call runs (None: whichever does).

    For another thread. Also wakes a thread that sleeps or reads. While a library is being imported
    it waits for the end of that: half of a package would stay in this process for good.
    """
    global _waiting
    with _lock:
        if _current is None or number not in (None, _current):
            return
        if not imports():
            _send()
        elif _waiting != _current:
            _waiting = _current
            arguments = [_current]
            threading.Thread(target=_interrupt_later, args=arguments, daemon=True).start()


def imports() -> bool:
    """Whether the main thread is just importing a library; from any thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _STUB:  # what is further out has called us
            return False
        if code.co_name == "<module>" and code.co_filename.startswith(LIBRARIES):
            return True
        frame = frame.f_back
    return False


def _send() -> None:
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signal.SIGINT)


def _interrupt_later(number: int) -> None:
    while _current == number:
        with _lock:
            if _current == number and not imports():
                _send()
                return
        time.sleep(_POLL_S)


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


def is_over() -> bool:
    """Whether no code of the user's runs in a call that could be interrupted."""
    return _current is None


def _ignore(number: int, frame: FrameType | None) -> None:
    """Nothing; ipykernel puts its own handler back when the request has been answered."""
