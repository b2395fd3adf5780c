"""What an engine answers while its main thread is busy. Runs on engines, in the control thread.

The main thread is in the middle of something else meanwhile: a handler sets a flag or frees it, and
touches nothing that the main thread uses.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from functools import partial
from typing import Any

from gpupool.core.wire import environ, requests
from gpupool.core.wire.requests import REQUESTS, Answer, ControlRequest, Found, Waits
from gpupool.data.stores import retry
from gpupool.data.stores.s3 import refresh_filesystems
from gpupool.engine import calls
from gpupool.engine.group import forming, location
from gpupool.engine.group.abort import abort_collectives
from gpupool.engine.output import streams
from gpupool.engine.process import pool_folder
from gpupool.engine.shell import this_shell

# What is to stop -> whether it ends where it is, as its data do not come. A signal's handler may
# add to it in the main thread.
_stopped: dict[str, bool] = {}


def install() -> None:
    kernel = this_shell().kernel
    for kind in REQUESTS:
        kernel.control_handlers[kind.message_type()] = partial(_handle, kernel.session, kind)


def _handle(
    session: Any, kind: type[ControlRequest[Any]], stream: Any, ident: Any, parent: Any
) -> None:
    content = parent["content"]
    if parent["buffers"]:  # ipykernel keeps the last message
        content = {**content, "data": parent["buffers"].pop()}
    given = answer(kind, content).content()
    found = [given.pop("found")] if isinstance(given["found"], bytes) else []
    reply = kind.message_type().replace("request", "reply")
    session.send(stream, reply, given, parent, ident, found)


def answer(kind: type[ControlRequest[Found]], content: Mapping[str, Any]) -> Answer[Found]:
    """Do what a request asks. Nothing is raised: ipykernel would log what may be a secret."""
    try:
        return Answer("ok", _do(kind(**content)))
    except Exception as error:
        return Answer("error", error=str(error) or type(error).__name__)


def _do(request: ControlRequest[Any]) -> Any:
    match request:
        case requests.Stop(name, at_once):
            return _request_stop(name, at_once)
        case requests.Interrupt(number):
            calls.interrupt(number)
        case requests.Abort(number):
            if number is not None:  # first: it may not take the failure for a reason to try again
                calls.interrupt(number)
            forming.give_up_waiting()
            abort_collectives()
        case requests.Where(glance):
            return location.locate(glance)
        case requests.Counts():
            return forming.counts()
        case requests.SetEnvironment(variables, unset, refresh):
            streams.secrets.add(environ.secret_values(variables))
            for name in unset:
                os.environ.pop(name, None)
            os.environ.update(variables)
            if refresh:
                refresh_filesystems()
        case requests.Signal(sig):
            os.kill(os.getpid(), getattr(signal, sig) if isinstance(sig, str) else sig)
        case requests.AppendToFile(name, data):
            with (pool_folder() / name).open("ab") as file:
                file.write(data)
            return str(pool_folder() / name)
        case requests.ReadFile(name, start, num_bytes):
            with (pool_folder() / name).open("rb") as file:
                file.seek(start if start >= 0 else max(0, os.fstat(file.fileno()).st_size + start))
                return file.read(num_bytes)
        case requests.RemoveFile(name):
            (pool_folder() / name).unlink(missing_ok=True)
    return None


def _request_stop(name: str, at_once: bool) -> Waits:
    """Remember what is to stop: the request may come before it has begun."""
    _stopped[name] = at_once or stops_at_once(name)
    oldest = retry.oldest()
    return Waits(
        batch_s=retry.waited_s(),
        store_s=oldest.passed_s if oldest else 0.0,
        reason=oldest.reason if oldest else "",
    )


def stop_requested(name: str = "") -> bool:
    """Whether the client has asked this rank to stop the training of this name; "": a loop."""
    return name in _stopped


def stops_at_once(name: str) -> bool:
    """Whether the training of this name, which is going to be interrupted, ends well with that."""
    return _stopped.get(name, False)


def clear_stop() -> None:
    """Forget an earlier request to stop a loop, at the start of one."""
    _stopped.pop("", None)
