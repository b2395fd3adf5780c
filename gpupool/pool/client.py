"""The connection to the controller: call an engine function, hear what the engine says meanwhile.

Runs on the client. With `launch.py` the only file of the client that knows ipyparallel. Names of
ipyparallel that are private, and used here because nothing public does the same, are each
guarded by a test in `tests/pool/test_private_names.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

from gpupool.core.invoke import invoke

# (kind, content): ("stdout" | "stderr", text), ("display" | "result", mime bundle),
# ("events", list of dicts)
OnMessage = Callable[[str, Any], None]


class EngineClient:
    """Calls by rank over ipyparallel's channels. Engine ids equal ranks by construction."""

    def __init__(self, connection_file: Path, timeout_s: float) -> None:
        ipyparallel = load_ipyparallel()
        # ipyparallel annotates nothing of what is used here
        self._client: Any = ipyparallel.Client(str(connection_file), timeout=timeout_s, debug=False)

    @property
    def ranks(self) -> list[int]:
        """The ranks whose engines have registered."""
        return sorted(self._client.ids)

    def call(
        self, rank: int, name: str, payload: dict[str, Any], on_message: OnMessage | None = None
    ) -> Future[Any]:
        """Call `gpupool.engine.entry.<name>(**payload)` on a rank.

        `on_message` is called in ipyparallel's IO thread with everything the engine publishes for
        this call. The future resolves after all of that has been delivered.
        """
        reply: Future[Any] = Future()

        def prepare(message: Any) -> None:  # runs before the request is sent: nothing is missed
            if on_message is not None:
                message.iopub_callbacks.append(lambda msg: _dispatch(msg, on_message))

        message = self._client.send_apply_request(
            self._client._mux_stream,  # the stream: sending on its socket loses its wake-up
            invoke,
            args=(name, payload),
            ident=self._client._engines[rank].encode(),
            message_future_hook=prepare,
        )
        # `message.output` resolves when the engine is idle again: after the last output.
        message.add_done_callback(
            lambda done: message.output.add_done_callback(lambda _: _settle(reply, done))
        )
        return reply

    def control(
        self, rank: int, request: str, content: dict[str, Any] | None = None
    ) -> Future[dict[str, Any]]:
        """Send a control request, which the engine answers while its main thread is busy.

        The future resolves to the content of the answer; it does not should the engine die.
        """
        answer: Future[dict[str, Any]] = Future()
        message = self._client._send(
            self._client._control_stream,
            request,
            content=content or {},
            ident=self._client._engines[rank].encode(),
        )
        message.add_done_callback(lambda done: answer.set_result(done.result()["content"]))
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

    def trim(self) -> None:
        """Forget the ids of past calls, which ipyparallel would keep for ever."""
        self._client.history.clear()

    def close(self) -> None:
        """Close the sockets. Futures that are still open stay so."""
        self._client.close(linger=0)


def load_ipyparallel() -> Any:
    """The module; `import gpupool` must not wait for it (0.3 s)."""
    import ipyparallel

    return ipyparallel


def _settle(reply: Future[Any], done: Any) -> None:
    result = done.result()  # ipyparallel puts an exception here as a value
    with contextlib.suppress(InvalidStateError):  # the rank was given up meanwhile
        if isinstance(result, BaseException):
            reply.set_exception(result)
        else:
            reply.set_result(result)


def _dispatch(msg: dict[str, Any], on_message: OnMessage) -> None:
    kind, content = msg["header"]["msg_type"], msg["content"]
    if kind == "stream":
        on_message(content["name"], content["text"])
    elif kind == "display_data":
        on_message("display", content)
    elif kind == "execute_result":
        on_message("result", content)
    elif kind == "data_message":
        from ipyparallel.serialize import deserialize_object

        data, _ = deserialize_object(msg["buffers"])
        on_message("events", data["events"])
