"""What engines publish, to the call that caused it, also after its end. Runs on the client.

ipyparallel would keep all text of a call in a string that it builds anew with every piece, and
would lose what comes after the reply. Here nothing is kept but a bounded list of who listens.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

# (kind, content): ("stdout" | "stderr", text), ("display" | "result" | "update", mime bundle),
# ("clear", {"wait": bool}), ("events", list of dicts), ("comm", a widget's message)
OnMessage = Callable[[str, Any], None]

MAX_LISTENERS = 256  # calls whose output goes to its place, also after their end
MAX_STRAY_TEXTS, MAX_STRAY_CHARS = 256, 1024  # of calls that nobody knows any more, and of each
PIECES = "gpupool_pieces"  # as in gpupool/engine/channel.py

_KINDS = {"display_data": "display", "execute_result": "result", "update_display_data": "update"}


class Router:
    """Gives each message to the listener of its call. `route` runs in one thread only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: OrderedDict[str, OnMessage] = OrderedDict()
        self._comms: dict[str, OnMessage] = {}
        self._stray: dict[str, deque[str]] = {}

    def listen(self, message_id: str, listener: OnMessage) -> None:
        """Give the messages of this call to `listener`, also those that come after its end."""
        with self._lock:
            self._listeners[message_id] = listener
            while len(self._listeners) > MAX_LISTENERS:
                self._listeners.popitem(last=False)

    def listen_as_to(self, comm_id: str, message_id: str) -> None:
        """Give the messages of a call to the one who listens to this widget."""
        listener = self._comms.get(comm_id)
        if listener is not None:
            self.listen(message_id, listener)

    def route(self, message: dict[str, Any], deserialize: Callable[[Any], Any]) -> None:
        """Pass a message on; `deserialize` reads what was published as data."""
        kind, content = message["header"]["msg_type"], message["content"]
        parent = message["parent_header"].get("msg_id", "")
        listener = self._listeners.get(parent)
        if kind.startswith("comm_"):
            self._route_comm(kind, message, listener)
        elif listener is not None:
            for piece in _pieces(kind, message, deserialize):
                _tell(listener, *piece)
        elif kind == "stream":
            engine = message["metadata"].get("engine", "")
            texts = self._stray.setdefault(engine, deque(maxlen=MAX_STRAY_TEXTS))
            texts.append(content["text"][-MAX_STRAY_CHARS:])

    def stray_text(self, engine: str) -> str:
        """The end of what an engine (its address) has said for calls that nobody knows any more."""
        return "".join(list(self._stray.get(engine, ())))

    def _route_comm(self, kind: str, message: dict[str, Any], listener: OnMessage | None) -> None:
        comm_id = message["content"]["comm_id"]
        if kind == "comm_open" and listener is not None:
            self._comms[comm_id] = listener
        owner = self._comms.get(comm_id)
        if kind == "comm_close":
            self._comms.pop(comm_id, None)
        if owner is not None:
            content = {
                "type": kind,
                "content": message["content"],
                "metadata": message["metadata"],
                "buffers": [bytes(buffer) for buffer in message["buffers"]],
            }
            _tell(owner, "comm", content)


def _pieces(
    kind: str, message: dict[str, Any], deserialize: Callable[[Any], Any]
) -> Iterator[tuple[str, Any]]:
    content = message["content"]
    if kind == "stream":
        lengths = message["metadata"].get(PIECES)
        if not lengths:
            yield content["name"], content["text"]
            return
        name, start = content["name"], 0
        for length in lengths:
            yield name, content["text"][start : start + length]
            name, start = ("stderr" if name == "stdout" else "stdout"), start + length
    elif kind in _KINDS:
        yield _KINDS[kind], content
    elif kind == "clear_output":
        yield "clear", content
    elif kind == "data_message":
        yield "events", deserialize(message["buffers"])["events"]


def _tell(listener: OnMessage, kind: str, content: Any) -> None:
    """A listener that fails must not end the thread that hears all engines."""
    try:
        listener(kind, content)
    except Exception:
        with contextlib.suppress(Exception):
            logging.getLogger("gpupool").exception("output of a rank was not taken in")
