"""What engines publish, to the call that caused it, also after its end. Runs on the client.

ipyparallel would keep all text of a call in a string that it rebuilds with every piece, and
would lose what comes after the reply. Here nothing is kept but a bounded list of who listens.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from gpupool.core.wire.output import PIECES, OnMessage, OutputKind

MAX_LISTENERS = 256  # calls whose output goes to its place, also after their end
_WIDGET = "application/vnd.jupyter.widget-view+json"

_KINDS = {
    "display_data": OutputKind.DISPLAY,
    "execute_result": OutputKind.RESULT,
    "update_display_data": OutputKind.UPDATE,
}


class Router:
    """Gives each message to the listener of its call. `route` runs in one thread only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: OrderedDict[str, OnMessage] = OrderedDict()

    def listen(self, message_id: str, listener: OnMessage) -> None:
        """Give the messages of this call to `listener`, also those that come after its end."""
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
