"""What an engine answers while its main thread is busy. Runs on engines, in the control thread.

A handler may only set a flag: the main thread is in the middle of something else.
"""

from __future__ import annotations

import threading
from typing import Any

STOP_REQUEST = "gpupool_stop_request"

_stop = threading.Event()


def install() -> None:
    """Register the handlers with this engine's kernel."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    kernel = shell.kernel

    def on_stop(stream: Any, ident: Any, parent: Any) -> None:
        _stop.set()
        reply = STOP_REQUEST.replace("request", "reply")
        kernel.session.send(stream, reply, content={"status": "ok"}, parent=parent, ident=ident)

    kernel.control_handlers[STOP_REQUEST] = on_stop


def stop_requested() -> bool:
    """Whether the client has asked this rank to stop its training."""
    return _stop.is_set()


def clear_stop() -> None:
    """Forget an earlier request, at the start of a training."""
    _stop.clear()
