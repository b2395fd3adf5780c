"""The call that this rank serves, and interrupts that are meant for it. Runs on engines.

An interrupt names the call it is meant for and is sent over the control channel: one that comes
too late, because the call has ended already, must not meet the next one. One that overtakes its
call, which comes over another channel, meets it when it begins.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpupool.core.wire.calls import invoke
from gpupool.core.wire.replies import Reply
from gpupool.engine.shell import LIBRARIES

WAKE = signal.SIGURG  # its handler does nothing
_WAKE_S = 0.02, 0.1, 0.5
_POLL_S = 0.02
_STUB = invoke.__code__.co_filename  # under every call

_current: int | None = None
_interrupted: int | None = None  # the call that was interrupted last
_unmet: set[int] = set()  # calls that were to be interrupted and did not run: over, or to come
_lock = threading.Lock()


def serve(number: int, work: Callable[[], Reply[Any]]) -> Reply[Any]:
    """What `work` returns; until then `interrupt(number)` ends it."""
    global _current
    with _lock:
        _current = number
        if number in _unmet:
            _unmet.discard(number)
            _interrupt_later(number)
    # here: a loop under torchrun imports this file, and may have no ipykernel
    from gpupool.engine.output import streams

    reply = None
    try:
        try:
            reply = work()
        finally:  # here an interrupt ends what the user's streams may wait for
            streams.restore_streams()
            over()
    except KeyboardInterrupt:  # it has struck between the work and here
        if reply is None:
            raise
    return reply


def interrupt(number: int | None) -> None:
    """Raise KeyboardInterrupt in the main thread if this call runs (None: whichever does), or when
    it begins. For another thread. While a library is being imported it waits for the end of that:
    half of a package would stay in this process for good."""
    with _lock:
        if number not in (None, _current):
            _unmet.add(number)
        elif _current is not None and not imports():
            _send()
        elif _current is not None:
            _interrupt_later(_current)


def imports() -> bool:
    """Whether the main thread is just importing a library, or runs what is to run before and after
    cells (`%autoreload`), an interrupt of which IPython swallows; from any thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _STUB:  # what is further out has called us
            return False
        if code.co_name == "<module>" and code.co_filename.startswith(LIBRARIES):
            return True
        if code.co_name == "trigger" and code.co_filename.endswith("IPython/core/events.py"):
            return True
        frame = frame.f_back
    return False


def current() -> int | None:
    """The number of the call that runs; None if no code of the user's could be interrupted."""
    return _current


def is_interrupted() -> bool:
    """Whether the call that runs has been interrupted, also if its code has passed over that."""
    return _current is not None and _current == _interrupted


def _send() -> None:
    global _interrupted
    main = threading.main_thread().ident
    assert main is not None
    _interrupted = _current
    signal.pthread_kill(main, signal.SIGINT)
    threading.Thread(target=_wake, args=(main, _current), daemon=True).start()


def _wake(main: int, number: int | None) -> None:
    """Have the main thread look for signals: one that comes between its last look and a system call
    (a sleep) is heard when that ends, and any other signal ends it."""
    for wait_s in _WAKE_S:
        time.sleep(wait_s)
        with _lock:
            if _current == number:
                signal.pthread_kill(main, WAKE)


def _interrupt_later(number: int) -> None:
    """Interrupt the call in a moment: when it has begun, or its import has ended."""

    def wait() -> None:
        while _current == number:
            time.sleep(_POLL_S)
            with _lock:
                if _current == number and not imports():
                    if _interrupted != number:  # else another one has waited for the same
                        _send()
                    return

    threading.Thread(target=wait, daemon=True).start()


def over() -> None:
    """The user's code of this call has ended: an interrupt has nothing to interrupt any more."""
    global _current
    if _current is None or threading.current_thread() is not threading.main_thread():
        return
    _be_deaf()
    with _lock:
        _current = None


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A block that no interrupt cuts off; those that come meanwhile do nothing."""
    before = signal.getsignal(signal.SIGINT)
    _be_deaf()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _be_deaf() -> None:
    """ipykernel puts its own handler back when the request has been answered."""
    # One that is on its way strikes while the handler is exchanged, or never.
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
