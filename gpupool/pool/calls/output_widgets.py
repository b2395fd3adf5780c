"""What the widgets that a rank makes show, as text. Runs on the client.

A rank's widget has no controls in the notebook: its text is shown. Two kinds of widget change it:
progress bars (tqdm.auto), and an Output of ipywidgets, which collects what the rank shows inside
`with output:`. Live displays of rich are such Outputs. The rank knows its own call alone, not the
notebook's message by whose name an Output collects, so this is done here.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from gpupool.core.wire.output import OutputKind

MAX_OUTPUTS = 200  # of an Output; beyond, the oldest is dropped
MAX_CHARS = 1_000_000  # of a text in it, of which the end is kept

_BAR = ["HTMLModel", "FloatProgressModel", "HTMLModel"]
# what is kept of a model's state, and its type: user code may send what it likes
_NOTED: dict[str, Any] = {
    "value": (str, int, float),
    "max": (int, float),
    "min": (int, float),
    "children": list,
}
_SPACES = str.maketrans({"\u2007": " ", "\u00a0": " "})


class Widgets:
    """The widgets of one rank, as far as their text changes."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, Any]] = {}
        self._parents: dict[str, str] = {}  # the box that a widget is in
        self._outputs: dict[str, list[dict[str, Any]]] = {}  # what stands in each Output
        self._collecting: list[str] = []  # the Outputs inside whose `with` the rank is, last first
        self._to_clear: set[str] = set()

    @property
    def is_collecting(self) -> bool:
        """Whether what the rank shows now belongs into an Output."""
        return bool(self._collecting)

    def note(self, message: Mapping[str, Any]) -> str:
        """Add a widget's message; returns the name of the widget whose text it may change."""
        content = message["content"]
        name, data = str(content["comm_id"]), content.get("data") or {}
        state = data.get("state")
        if message["type"] == "comm_close":
            self._models.setdefault(name, {})["closed"] = True
        elif isinstance(state, dict):
            self._note_state(name, state)
        return self._parents.get(name, name)

    def _note_state(self, name: str, state: dict[str, Any]) -> None:
        model = self._models.setdefault(name, {"kind": str(state.get("_model_name", ""))})
        kept = {key: state[key] for key in _NOTED if isinstance(state.get(key), _NOTED[key])}
        model.update(kept)
        for child in kept.get("children", ()):
            self._parents[_name_of(child)] = name
        if isinstance(state.get("outputs"), list):
            self._outputs[name] = [one for one in state["outputs"] if isinstance(one, dict)]
        if "msg_id" in state:
            self._collecting = [one for one in self._collecting if one != name]
            if state["msg_id"]:
                self._collecting.insert(0, name)

    def collect(self, kind: OutputKind, content: Any) -> str:
        """Put what the rank shows into the Output that collects it; returns that one's name."""
        name = self._collecting[0]
        outputs = self._outputs.setdefault(name, [])
        if kind is OutputKind.CLEAR and content.get("wait"):
            self._to_clear.add(name)
        elif kind is OutputKind.CLEAR or name in self._to_clear:
            self._to_clear.discard(name)
            outputs.clear()
        if kind.is_text:
            last = outputs.pop() if outputs and outputs[-1].get("name") == kind else {"text": ""}
            outputs.append({"name": kind, "text": (last["text"] + content)[-MAX_CHARS:]})
        elif kind is not OutputKind.CLEAR:
            outputs.append({"data": content["data"]})
        del outputs[:-MAX_OUTPUTS]
        return self._parents.get(name, name)

    def text(self, name: str) -> str | None:
        """What a widget shows; None if its text does not change, "" if it is gone.

        Of a progress bar what tqdm writes in a terminal:
        " 40%|████      | 2/5 [00:01<00:02,  1.6it/s]"
        """
        shown = self.shown(name)
        if shown is None:
            return None
        return "\n".join(str(data.get("text/plain", "")) for data in shown)

    def shown(self, name: str) -> list[dict[str, Any]] | None:
        """What a widget shows as data of mime bundles; None and [] as for `text`."""
        model = self._models.get(name, {})
        if model.get("closed"):  # as by tqdm(leave=False)
            return []
        if model.get("kind") == "OutputModel":
            shown = [_data_of(output) for output in self._outputs.get(name, ())]
            return [data for data in shown if str(data.get("text/plain", "x")).strip()]
        parts = [self._models.get(_name_of(child), {}) for child in model.get("children", ())]
        if [part.get("kind") for part in parts] != _BAR:
            return None
        before, bar, after = parts
        return [{"text/plain": f"{_text_of(before)}|{_drawn(bar)}|{_text_of(after)}"}]


def _name_of(child: object) -> str:
    return str(child).removeprefix("IPY_MODEL_")


def _data_of(output: Mapping[str, Any]) -> dict[str, Any]:
    data = output.get("data")
    return (
        data if isinstance(data, dict) else {"text/plain": str(output.get("text", "")).rstrip("\n")}
    )


def _drawn(bar: Mapping[str, Any]) -> str:
    low, high, value = (float(bar.get(key) or 0.0) for key in ("min", "max", "value"))
    share = min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0
    full = round(10 * share)
    return "█" * full + " " * (10 - full)


def _text_of(label: Mapping[str, Any]) -> str:
    return html.unescape(str(label.get("value") or "")).translate(_SPACES)
