"""The connection to the controller: call an engine function, hear what the engine says of it.

Runs on the client, of which it is the only file that imports ipyparallel. Private names of
ipyparallel are used here because nothing public does the same. It would keep all text of a call in
a string that it rebuilds with every piece, and would lose what comes after the reply. Here nothing
is kept but a bounded list of who listens.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

from gpupool.core.wire.calls import Call, invoke
from gpupool.core.wire.output import PIECES, OnMessage, OutputKind
from gpupool.core.wire.replies import Reply, Value
from gpupool.core.wire.requests import Answer, ControlRequest, Found
from gpupool.pool.launchers.starter import uninterrupted

_NUM_HELLOS, _HELLO_S = 10, 0.5
_DROPPED = "a message to the pool was dropped, as it is not signed or not whole; more are counted"
MAX_LISTENERS = 256  # calls whose output goes to its place, also after their end
_WIDGET = "application/vnd.jupyter.widget-view+json"

_KINDS = {
    "display_data": OutputKind.DISPLAY,
    "execute_result": OutputKind.RESULT,
    "update_display_data": OutputKind.UPDATE,
}


class EngineClient:
    """Calls by rank over ipyparallel's channels. Engine ids equal ranks by construction."""

    def __init__(self, connection_file: Path, timeout_s: float) -> None:
        # ipyparallel annotates nothing of what is used here
        self._client: Any = _client_class()(str(connection_file), timeout=timeout_s, debug=False)
        self._router: Router = self._client.router
        # signatures of messages that it remembers, against repeated ones; it comes with 65536
        self._client.session.digest_history_size = 1024

    @property
    def ranks(self) -> list[int]:
        return sorted(self._client.ids)

    def call(
        self,
        rank: int,
        call: Call[Value],
        on_message: OnMessage,
        on_end: Callable[[Future[Any]], None],
    ) -> Future[Reply[Value]]:
        """Make a call on a rank.

        `on_message` is called in ipyparallel's IO thread with everything the engine publishes for
        this call. The future resolves after all of that has been delivered, but for what threads
        and child processes that the call has left behind say later; just before, `on_end` hears it.
        """
        reply: Future[Reply[Value]] = Future()

        def finish(done: Any) -> None:
            result = done.result()  # ipyparallel puts an exception here as a value
            on_end(reply)
            with contextlib.suppress(InvalidStateError):  # the rank was given up meanwhile
                if isinstance(result, BaseException):
                    reply.set_exception(result)
                else:
                    reply.set_result(result)

        self._client.history.clear()  # ids of past calls, which it would keep for ever
        message = self._client.send_apply_request(
            self._client._mux_stream,  # the stream: sending on its socket loses its wake-up
            invoke,
            args=(call,),
            ident=self._client._engines[rank].encode(),
            # runs before the request is sent: nothing is missed
            message_future_hook=lambda sent: self._router.listen(sent.msg_id, on_message),
        )
        # `message.output` resolves after the last output: when the engine is idle again, or the
        # reply says that there was none (gpupool/engine/output/channel.py).
        message.add_done_callback(
            lambda done: message.output.add_done_callback(lambda _: finish(done))
        )
        return reply

    def control(self, rank: int, request: ControlRequest[Found]) -> Future[Answer[Found]]:
        """Send a control request, which the engine answers while its main thread is busy.

        The future does not resolve should the engine die.
        """
        answer: Future[Answer[Found]] = Future()
        content = request.content()
        data = [content.pop("data")] if "data" in content else []
        message = self._client._send(
            self._client._control_stream,
            request.message_type(),
            content=content,
            buffers=data,
            ident=self._client._engines[rank].encode(),
        )

        def take(done: Any) -> None:
            with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
                content, beside = done.result()["content"], done.result()["buffers"]
                found = {"found": beside[0]} if beside else {}
                answer.set_result(request.answer({**content, **found}))

        message.add_done_callback(take)
        return answer

    def unregister(self, rank: int) -> None:
        """Have the controller forget a dead engine, so that another can take its rank.

        As ipyparallel's nanny does it (`engine/nanny.py`).
        """
        self._client._io_loop.add_callback(
            self._client._send,
            self._client._query_stream,
            "unregistration_request",
            content={"id": rank},
        )

    def ask_for_engines(self) -> None:
        """Ask the controller which engines it has; returns at once, `ranks` has them soon.

        Its notifications come over a channel of their own, whose encryption may be ready later than
        the first engine: what it has sent before is lost.
        """
        client = self._client

        def ask() -> None:
            client._send(client._query_stream, "connection_request").add_done_callback(
                lambda done: client._update_engines(done.result()["content"].get("engines", {}))
            )

        client._io_loop.add_callback(ask)

    def close(self) -> None:
        """Close the sockets. Futures that are still open stay so."""
        self._client.close(linger=0)


def plain_client(connection_file: Path) -> Any:
    """An `ipyparallel.Client` that hears its engines.

    What they say before it has subscribed is lost, and who waits for the end of the output would
    wait for ever: so they are asked until it hears them, unless they are busy.
    """
    client: Any = load_ipyparallel().Client(str(connection_file))
    for _ in range(_NUM_HELLOS):
        asked = client[:].apply_async(os.getpid)
        asked.wait(_HELLO_S)
        if not asked.ready() or asked.wait_for_output(_HELLO_S):
            break
    client.purge_local_results("all")
    return client


class Router:
    """Gives each message to the listener of its call. `route` runs in one thread only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: OrderedDict[str, OnMessage] = OrderedDict()

    def listen(self, message_id: str, listener: OnMessage) -> None:
        with self._lock:
            self._listeners[message_id] = listener
            while len(self._listeners) > MAX_LISTENERS:
                self._listeners.popitem(last=False)

    def route(self, message: Any, deserialize: Callable[[Any], Any]) -> None:
        """Pass a message on; `deserialize` reads what was published as data.

        User code may publish what it likes, and nothing of it may end the thread that hears all
        engines: what cannot be read or taken in is dropped.
        """
        try:
            kind = message["header"]["msg_type"]
            listener = self._listeners.get(message["parent_header"]["msg_id"])
            if listener is not None:
                for piece in _pieces(kind, message, deserialize):
                    listener(*piece)
        except Exception:
            with contextlib.suppress(Exception):
                logging.getLogger("gpupool").exception("output of a rank was not taken in")


def unheard_output(rank: int, kind: OutputKind, content: Any) -> None:
    """Output of calls that show nothing."""


def _pieces(
    kind: str, message: dict[str, Any], deserialize: Callable[[Any], Any]
) -> Iterator[tuple[OutputKind, Any]]:
    content = message["content"]
    if kind == "stream":
        name, start = OutputKind(content["name"]), 0
        for length in message["metadata"].get(PIECES) or [len(content["text"])]:
            yield name, content["text"][start : start + length]
            start += length
            name = OutputKind.STDERR if name is OutputKind.STDOUT else OutputKind.STDOUT
    elif kind in _KINDS:
        # without the view of a widget, whose model is on the rank alone
        data = {mime: shown for mime, shown in content["data"].items() if mime != _WIDGET}
        yield _KINDS[kind], {**content, "data": data}
    elif kind == "clear_output":
        yield OutputKind.CLEAR, content
    elif kind == "data_message":
        yield OutputKind.EVENTS, deserialize(message["buffers"])[OutputKind.EVENTS]


@functools.cache
def load_ipyparallel() -> Any:
    """The module; `import gpupool` must not wait for it (0.3 s), nor the first call for numpy."""
    # An interrupt that cuts off numpy's import costs this process numpy for good ("cannot load
    # module more than once per process").
    with uninterrupted():
        import ipyparallel
        import numpy  # noqa: F401 - ipyparallel does it when it first packs arguments
    return ipyparallel


@functools.cache
def _client_class() -> Any:
    """ipyparallel's client with our way for what engines publish."""
    base: Any = load_ipyparallel().Client
    from ipyparallel.serialize import deserialize_object

    def heard(handle: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """A socket's callback: what cannot be read or handled is dropped and counted.

        An exception that leaves the callback would make the socket deaf for good.
        """

        def dispatch(self: Any, frames: Any) -> None:
            try:
                _, parts = self.session.feed_identities(frames, copy=False)
                handle(self, self.session.deserialize(parts, content=True, copy=False))
            except Exception:
                self.num_dropped += 1
                if self.num_dropped == 1:  # the others may be many
                    logging.getLogger("gpupool").warning(_DROPPED, exc_info=True)

        return dispatch

    class Client(base):  # type: ignore[misc]
        num_dropped = 0
        _dispatch_single_reply = heard(base._dispatch_single_reply.__wrapped__)
        _dispatch_notification = heard(base._dispatch_notification.__wrapped__)

        def __init__(self, *args: Any, **options: Any) -> None:
            self.router = Router()
            super().__init__(*args, **options)

        @heard
        def _dispatch_reply(self, message: Any) -> None:
            message["metadata"].pop("started", None)  # nobody asks, and to read a date takes 0.1 ms
            base._dispatch_reply.__wrapped__(self, message)
            if message["content"].get("silent"):
                self._end_output(message)

        @heard
        def _dispatch_iopub(self, message: Any) -> None:
            parent = message["parent_header"]
            if not parent or parent["session"] != self.session.session:  # of another client
                return
            if message["header"]["msg_type"] != "status":
                self.router.route(message, lambda buffers: deserialize_object(buffers)[0])
            elif message["content"]["execution_state"] == "idle":  # after all output
                self._end_output(message)

        def _end_output(self, message: Any) -> None:
            output = self._output_futures.get(message["parent_header"]["msg_id"])
            if output is not None and not output.done():
                output.set_result(None)

    return Client
