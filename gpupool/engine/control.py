"""What an engine answers while its main thread is busy. Runs on engines, in the control thread.

The main thread is in the middle of something else meanwhile: a handler sets a flag or frees it, and
touches nothing that the main thread uses.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpupool.core.wire import environ
from gpupool.core.wire.requests import (
    REQUESTS,
    Abort,
    Answer,
    ControlRequest,
    Counts,
    Found,
    Interrupt,
    SetEnvironment,
    Signal,
    Stop,
    Waits,
    Where,
)
from gpupool.data.stores import retry, waiting
from gpupool.data.stores.fsspec_store import refresh_filesystems
from gpupool.engine import calls
from gpupool.engine.group import forming, location
from gpupool.engine.group.abort import abort_collectives
from gpupool.engine.output import log

_stopped: set[str] = set()  # what is to stop; a signal's handler may add to it in the main thread
_newest_environment = 0  # number of the request
_stopped_at_once: set[str] = set()  # trainings that end where they are: their data do not come


def install() -> None:
    """Register the handlers with this engine's kernel."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    kernel = shell.kernel

    def handler(kind: type[ControlRequest[Any]]) -> Callable[[Any, Any, Any], None]:
        request_type = kind.message_type()

        def handle(stream: Any, ident: Any, parent: Any) -> None:
            content = answer(kind, parent["content"]).content()
            reply = request_type.replace("request", "reply")
            kernel.session.send(stream, reply, content=content, parent=parent, ident=ident)

        return handle

    kernel.control_handlers.update({kind.message_type(): handler(kind) for kind in REQUESTS})


def answer(kind: type[ControlRequest[Found]], content: Mapping[str, Any]) -> Answer[Found]:
    """Do what a request of this kind, with this content, asks.

    Nothing is raised: ipykernel would log it, and with it what may be a secret.
    """
    try:
        return Answer("ok", _do(kind(**content)))
    except Exception as error:
        return Answer("error", error=str(error) or type(error).__name__)


def _do(request: ControlRequest[Any]) -> Any:
    match request:
        case Stop(name, at_once):
            return _request_stop(name, at_once)
        case Interrupt(number):
            calls.interrupt(number)
        case Abort(number):
            _abort(number)
        case Where(glance):
            return location.locate(glance)
        case Counts():
            return forming.counts()
        case SetEnvironment(variables, unset, refresh, number):
            _set_environment(variables, unset, refresh, number)
        case Signal(sig):
            _signal(sig)
    return None


def _set_environment(
    variables: Mapping[str, str], unset: Sequence[str], refresh: bool, number: int
) -> None:
    """Set and remove environment variables, unless that was done for a request of this number.

    Args:
        refresh: also have open file systems take new credentials. Not needed for keys that replace
            others with an expiry (AWS_CREDENTIAL_EXPIRATION): botocore reads the variables again.
    """
    global _newest_environment
    if number and number <= _newest_environment:
        return
    # First: where a refresh takes long, the same request waits behind it, and must not begin it
    # once more.
    _newest_environment = max(number, _newest_environment)
    log.hide(environ.secret_values(variables))
    environ.apply(variables, unset)
    if refresh:
        refresh_filesystems()


def _request_stop(name: str, at_once: bool) -> Waits:
    """Remember what is to stop: the request may come before it has begun."""
    _stopped.add(name)
    if at_once:
        _stopped_at_once.add(name)
    oldest = retry.oldest()
    return Waits(
        batch_s=waiting.waited_s() or 0.0,
        store_s=oldest.passed_s if oldest else 0.0,
        reason=oldest.reason if oldest else "",
    )


def _abort(number: int | None) -> None:
    """Interrupt the call of this number, if it runs, and abort the collectives of this rank."""
    # First of all, so that the call cannot take the failed collective for a reason to try again.
    if number is not None:
        calls.interrupt(number)
    forming.give_up_waiting()
    abort_collectives()


def _signal(sig: int | str) -> None:
    """Send this process a signal, to the thread that may sleep or read."""
    number = getattr(signal, sig) if isinstance(sig, str) else sig
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


def stop_requested(name: str = "") -> bool:
    """Whether the client has asked this rank to stop the training of this name; "": a loop."""
    return name in _stopped


def stops_at_once(name: str) -> bool:
    """Whether the training of this name, which is going to be interrupted, ends well with that."""
    return name in _stopped_at_once


def clear_stop() -> None:
    """Forget an earlier request to stop a loop, at the start of one."""
    _stopped.discard("")
