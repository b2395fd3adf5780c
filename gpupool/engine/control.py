"""What an engine answers while its main thread is busy. Runs on engines, in the control thread.

The main thread is in the middle of something else meanwhile: a handler sets a flag or frees it, and
touches nothing that the main thread uses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gpupool.engine.abort import abort_collectives

STOP_REQUEST = "gpupool_stop_request"  # end the training after the next report
ABORT_REQUEST = "gpupool_abort_request"  # get out of the collective

_stop = threading.Event()
_ACTIONS: dict[str, Callable[[], object]] = {
    STOP_REQUEST: _stop.set,
    ABORT_REQUEST: abort_collectives,
}


def act(request: str) -> None:
    """Do what a request asks for; from any thread."""
    _ACTIONS[request]()


def install() -> None:
    """Register the handlers with this engine's kernel."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    kernel = shell.kernel

    def answer(request: str) -> None:
        def handler(stream: Any, ident: Any, parent: Any) -> None:
            act(request)
            reply = request.replace("request", "reply")
            kernel.session.send(stream, reply, content={"status": "ok"}, parent=parent, ident=ident)

        kernel.control_handlers[request] = handler

    for request in _ACTIONS:
        answer(request)


def stop_requested() -> bool:
    """Whether the client has asked this rank to stop its training."""
    return _stop.is_set()


def clear_stop() -> None:
    """Forget an earlier request, at the start of a training."""
    if _stop.is_set():  # rather not taking its lock: a signal's handler may set it in this thread
        _stop.clear()
