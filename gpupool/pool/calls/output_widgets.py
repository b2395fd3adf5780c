"""What ranks show inside `with output:`, an Output of ipywidgets. Runs on the client.

A front end puts it into the widget: it has the notebook's message by whose name the widget asks for
it. A rank knows its own call alone, so it is put there here. Live displays of rich are made so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WIDGET = "application/vnd.jupyter.widget-view+json"
MAX_OUTPUTS = 200  # of a widget; beyond, the oldest is let go
MAX_CHARS = 1_000_000  # of a text in it, of which the end is kept


class OutputWidgets:
    """The Output widgets of the ranks of a cell, and what stands in them."""

    def __init__(self) -> None:
        self._open: dict[int, list[str]] = {}  # rank -> those that take its output, the last first
        self._outputs: dict[str, list[dict[str, Any]]] = {}
        self._to_clear: set[str] = set()

    def note(self, rank: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take in a widget's message; gives what the front end is to be told."""
        content = message["content"]
        data = content.get("data") or {}
        state = data.get("state") or {}
        if not isinstance(state, dict) or "msg_id" not in state:
            return message
        comm_id, taking = content["comm_id"], self._open.setdefault(rank, [])
        if state["msg_id"] and comm_id not in taking:
            taking.insert(0, comm_id)
        elif not state["msg_id"] and comm_id in taking:
            taking.remove(comm_id)
        state = {key: value for key, value in state.items() if key != "msg_id"}
        return {**message, "content": {**content, "data": {**data, "state": state}}}

    def is_taking(self, rank: int) -> bool:
        """Whether what the rank shows now belongs into a widget."""
        return bool(self._open.get(rank))

    def take(self, rank: int, kind: str, content: Any) -> dict[str, Any]:
        """Put output into the widget that takes it; gives the widget's message about that."""
        comm_id = self._open[rank][0]
        outputs = self._outputs.setdefault(comm_id, [])
        if kind == "clear" and content.get("wait"):
            self._to_clear.add(comm_id)
        elif kind == "clear" or comm_id in self._to_clear:
            self._to_clear.discard(comm_id)
            outputs.clear()
        if kind in ("stdout", "stderr"):
            last = outputs.pop() if outputs and outputs[-1].get("name") == kind else {"text": ""}
            text = (last["text"] + content)[-MAX_CHARS:]
            outputs.append({"output_type": "stream", "name": kind, "text": text})
        elif kind != "clear":
            shown = {"data": content["data"], "metadata": content.get("metadata") or {}}
            outputs.append({"output_type": "display_data", **shown})
        del outputs[:-MAX_OUTPUTS]
        state = {"outputs": list(outputs)}
        data = {"method": "update", "state": state, "buffer_paths": []}
        told = {"comm_id": comm_id, "data": data}
        return {"type": "comm_msg", "content": told, "metadata": {}, "buffers": []}

    def text(self, bundle: Mapping[str, Any]) -> str | None:
        """The text of what stands in the widget that a mime bundle shows; None for other ones."""
        outputs = self._outputs.get(model_id(bundle))
        return None if outputs is None else text_of(outputs)


def model_id(bundle: Mapping[str, Any]) -> str:
    """The name of the widget that a mime bundle shows; "" if it shows none."""
    view = bundle["data"].get(WIDGET)
    return str(view.get("model_id", "")) if isinstance(view, Mapping) else ""


def text_of(outputs: list[dict[str, Any]]) -> str:
    """What stands in a widget, as text."""
    return "\n".join(
        str(output.get("text") or output.get("data", {}).get("text/plain", "")).rstrip("\n")
        for output in outputs
    )
