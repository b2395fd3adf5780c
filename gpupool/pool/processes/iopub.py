"""What engines publish, to the call that caused it, also after its end. Runs on the client.

ipyparallel would keep all text of a call in a string that it rebuilds with every piece, and
would lose what comes after the reply. Here nothing is kept but a bounded list of who listens.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from gpupool.core.wire.events import PIECES
from gpupool.core.wire.output import OnMessage, OutputKind

MAX_LISTENERS = 256  # calls whose output goes to its place, also after their end
MAX_STRAY_TEXTS, MAX_STRAY_CHARS = 256, 1024  # of calls that nobody knows any more, and of each
WIDGET = "application/vnd.jupyter.widget-view+json"

_KINDS = {
    "display_data": OutputKind.DISPLAY,
    "execute_result": OutputKind.RESULT,
    "update_display_data": OutputKind.UPDATE,
}
_OTHER_STREAM = {
    OutputKind.STDOUT: OutputKind.STDERR,
    OutputKind.STDERR: OutputKind.STDOUT,
}
_Kind = TypeVar("_Kind")


class Router:
    """Gives each message to the listener of its call. `route` runs in one thread only.

    `num_dropped` counts the messages that were passed on to nobody as their shape was not right.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: OrderedDict[str, OnMessage] = OrderedDict()
        self._comms: dict[str, OnMessage] = {}
        self._stray: dict[str, deque[str]] = {}
        self.num_dropped = 0

    def listen(self, message_id: str, listener: OnMessage) -> None:
        """Give the messages of this call to `listener`, also those that come after its end."""
        with self._lock:
            self._listeners[message_id] = listener
            while len(self._listeners) > MAX_LISTENERS:
                self._listeners.popitem(last=False)

    def route(self, message: Any, deserialize: Callable[[Any], Any]) -> None:
        """Pass a message on; `deserialize` reads what was published as data.

        One whose shape is not that of its kind is dropped, and counted in `num_dropped`.
        """
        try:
            listener, pieces = self._read(message, deserialize)
        except Exception as error:  # user code may publish what it likes
            self.num_dropped += 1
            if self.num_dropped == 1:
                what = type(error).__name__
                logging.getLogger("gpupool").warning("a rank's message was dropped: %s", what)
            return
        for piece in pieces:
            _tell(listener, *piece)

    def _read(
        self, message: Any, deserialize: Callable[[Any], Any]
    ) -> tuple[OnMessage, list[tuple[OutputKind, Any]]]:
        """Who is to hear what of a message. Raises whatever if it has not the right shape."""
        kind, content = _a(str, message["header"]["msg_type"]), _a(dict, message["content"])
        parent = _a(str, message["parent_header"].get("msg_id", ""))
        listener = self._listeners.get(parent)
        if kind.startswith("comm_"):
            return self._read_comm(kind, message, listener)
        if listener is not None:
            return listener, list(_pieces(kind, message, deserialize))
        if kind == "stream":
            engine = _a(str, message["metadata"].get("engine", ""))
            text = _a(str, content["text"])[-MAX_STRAY_CHARS:]
            self._stray.setdefault(engine, deque(maxlen=MAX_STRAY_TEXTS)).append(text)
        return _nobody, []

    def stray_text(self, engine: str) -> str:
        """The end of what an engine (its address) has said for calls that nobody knows any more."""
        return "".join(list(self._stray.get(engine, ())))

    def _read_comm(
        self, kind: str, message: dict[str, Any], listener: OnMessage | None
    ) -> tuple[OnMessage, list[tuple[OutputKind, Any]]]:
        comm_id = _a(str, message["content"]["comm_id"])
        _a(dict, message["content"].get("data") or {})
        if kind == "comm_open" and listener is not None:
            self._comms[comm_id] = listener
        owner = self._comms.get(comm_id, _nobody)
        if kind == "comm_close":
            self._comms.pop(comm_id, None)
        return owner, [(OutputKind.COMM, {"type": kind, "content": message["content"]})]


def unheard_output(rank: int, kind: OutputKind, content: Any) -> None:
    """Output of calls that show nothing."""


def _nobody(kind: OutputKind, content: Any) -> None:
    """Hears what is for nobody."""


def _a(kind: type[_Kind], value: Any) -> _Kind:
    if not isinstance(value, kind):
        raise TypeError(type(value).__name__)
    return value


def _pieces(
    kind: str, message: dict[str, Any], deserialize: Callable[[Any], Any]
) -> Iterator[tuple[OutputKind, Any]]:
    content = message["content"]
    if kind == "stream":
        name, text = OutputKind(content["name"]), _a(str, content["text"])
        other = _OTHER_STREAM[name]
        lengths = _a(dict, message["metadata"]).get(PIECES)
        if not lengths:
            yield name, text
            return
        start = 0
        for length in _a(list, lengths):
            yield name, text[start : start + length]
            name, other, start = other, name, start + length
    elif kind in _KINDS:
        _a(dict, content["data"])
        _a(dict, content.get("metadata") or {})
        _a(dict, content.get("transient") or {})
        yield _KINDS[kind], _without_view(content)
    elif kind == "clear_output":
        yield OutputKind.CLEAR, content
    elif kind == "data_message":
        plain = _a(list, deserialize(message["buffers"])[OutputKind.EVENTS])
        yield OutputKind.EVENTS, [_a(dict, event) for event in plain]


def _without_view(content: dict[str, Any]) -> dict[str, Any]:
    """The mime bundle without the view of a widget, whose model is on the rank alone."""
    if WIDGET not in content["data"]:
        return content
    view = content["data"][WIDGET]
    name = str(view.get("model_id", "")) if isinstance(view, dict) else ""
    data = {mime: shown for mime, shown in content["data"].items() if mime != WIDGET}
    return {**content, "data": data, "widget": name}


def _tell(listener: OnMessage, kind: OutputKind, content: Any) -> None:
    """A listener that fails must not end the thread that hears all engines."""
    try:
        listener(kind, content)
    except Exception:
        with contextlib.suppress(Exception):
            logging.getLogger("gpupool").exception("output of a rank was not taken in")
