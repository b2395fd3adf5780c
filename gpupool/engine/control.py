"""What an engine answers while its main thread is busy. Runs on engines, in the control thread.

The main thread is in the middle of something else meanwhile: a handler sets a flag or frees it, and
touches nothing that the main thread uses.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from gpupool.core.wire import environ, requests
from gpupool.data.stores import retry, waiting
from gpupool.data.stores.fsspec_store import refresh_filesystems
from gpupool.engine import calls
from gpupool.engine.group import forming, rendezvous, whereabouts
from gpupool.engine.group.abort import abort_collectives
from gpupool.engine.output import log

SIGNAL_REQUEST = "signal_request"  # of ipyparallel's `send_signal`, which its nanny would answer

_stopped: set[str] = set()  # what is to stop; a signal's handler may add to it in the main thread
_stopped_at_once: set[str] = set()  # trainings that end where they are: their data do not come


def install() -> None:
    """Register the handlers with this engine's kernel."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    kernel = shell.kernel

    def handler(message_type: str) -> Callable[[Any, Any, Any], None]:
        def handle(stream: Any, ident: Any, parent: Any) -> None:
            reply = message_type.replace("request", "reply")
            content = answer(message_type, parent["content"])
            kernel.session.send(stream, reply, content=content, parent=parent, ident=ident)

        return handle

    kernel.control_handlers.update({name: handler(name) for name in _ANSWERS})


def answer(message_type: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Do what a request asks; the reply has "status" "ok", or "error" with the error's text.

    What the handler returns as a dict is in the reply as well.

    Nothing is raised: ipykernel would log it, and with it what may be a secret.
    """
    try:
        told = _ANSWERS[message_type](**content)
    except Exception as error:
        return {"status": "error", "error": str(error) or type(error).__name__}
    return {"status": "ok", **(told if isinstance(told, dict) else {})}


def set_environment(variables: Mapping[str, str], unset: list[str], refresh: bool) -> None:
    """Set and remove environment variables.

    Args:
        refresh: also have open file systems take new credentials. Not needed for keys that replace
            others with an expiry (AWS_CREDENTIAL_EXPIRATION): botocore reads the variables again.
    """
    log.hide(environ.secret_values(variables))
    environ.apply(variables, unset)
    if refresh:
        refresh_filesystems()


def _request_stop(name: str = "", at_once: bool = False) -> dict[str, Any]:
    """Remember what is to stop: the request may come before it has begun.

    Tells how long a batch has been waited for, the same of the store, and why that goes on.
    """
    _stopped.add(name)
    if at_once:
        _stopped_at_once.add(name)
    oldest = retry.oldest()
    return {
        "batch_s": waiting.waited_s() or 0.0,
        "store_s": oldest.passed_s if oldest else 0.0,
        "reason": oldest.reason if oldest else "",
    }


def _abort(number: int | None = None) -> None:
    """Interrupt the call of this number, if it runs, and abort the collectives of this rank."""
    # First of all, so that the call cannot take the failed collective for a reason to try again.
    if number is not None:
        calls.interrupt(number)
    rendezvous.give_up_waiting()
    abort_collectives()


def _signal(sig: int | str) -> None:
    """Send this process a signal, to the thread that may sleep or read."""
    number = getattr(signal, sig) if isinstance(sig, str) else sig
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


def _tell_where(**how: bool) -> dict[str, Any]:
    return {"where": whereabouts.whereabouts(**how)}


# type of the message -> what answers it, with the fields of the request as arguments
_ANSWERS: dict[str, Callable[..., object]] = {
    requests.Stop.message_type(): _request_stop,
    requests.Interrupt.message_type(): calls.interrupt,
    requests.Abort.message_type(): _abort,
    requests.Where.message_type(): _tell_where,
    requests.Counts.message_type(): lambda: {"counts": forming.counts()},
    requests.SetEnvironment.message_type(): set_environment,
    SIGNAL_REQUEST: _signal,
}


def stop_requested(name: str = "") -> bool:
    """Whether the client has asked this rank to stop the training of this name; "": a loop."""
    return name in _stopped


def stops_at_once(name: str) -> bool:
    """Whether the training of this name, which is going to be interrupted, ends well with that."""
    return name in _stopped_at_once


def clear_stop() -> None:
    """Forget an earlier request to stop a loop, at the start of one."""
    _stopped.discard("")
