"""Widgets that ranks make, alive in the notebook: messages both ways. Runs on the client.

A rank's widget is a model with a name, whose messages go through the notebook's kernel. Progress
bars (tqdm.auto) are noted besides: in the end their last state stays as text.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any

from IPython.core.getipython import get_ipython

from gpupool.notebook.page.cell_output import Place
from gpupool.pool.calls.output import RankOutput
from gpupool.pool.calls.output_widgets import model_id, text_of

SendComm = Callable[[int, dict[str, Any]], None]

_NOTED = ("_model_name", "value", "max", "min", "children", "bar_style", "outputs")
# Nobody can press these: what is in an Output beside them alone does not change any more.
_PASSIVE = {"Output", "Layout", "HBox", "VBox", "Box", "HTML", "HTMLMath", "Label", "Image"}
_PASSIVE |= {"FloatProgress", "IntProgress"}
_SPACES = str.maketrans({"\u2007": " ", "\u00a0": " "})


class Bars:
    """The progress bars among the widgets of the ranks, by what their messages say."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, Any]] = {}

    def note(self, message: Mapping[str, Any]) -> None:
        """Take in a widget's message."""
        content = message["content"]
        data = content.get("data") or {}
        if message["type"] == "comm_close":
            self._models.setdefault(content["comm_id"], {})["closed"] = True
        elif message["type"] == "comm_open" or data.get("method") == "update":
            model = self._models.setdefault(content["comm_id"], {})
            state = data.get("state") or {}
            model.update({key: state[key] for key in _NOTED if key in state})

    def text(self, bundle: Mapping[str, Any]) -> str | None:
        """The bar that a mime bundle shows, as tqdm writes it in a terminal; None if it is none.

        Empty if it is to be gone in the end (`leave=False`). Else, for example:
        " 40%|████      | 2/5 [00:01<00:02,  1.6it/s]"
        """
        model = self._models.get(model_id(bundle), {})
        if model.get("_model_name") == "OutputModel" and not self._have_controls():
            return "" if model.get("closed") else text_of(model.get("outputs") or [])
        children = [
            self._models.get(str(child).removeprefix("IPY_MODEL_"), {})
            for child in model.get("children") or ()
        ]
        names = [child.get("_model_name") for child in children]
        if names != ["HTMLModel", "FloatProgressModel", "HTMLModel"]:
            return None
        if model.get("closed"):
            return ""
        left, bar, right = children
        before, after = (_text_of(child.get("value")) for child in (left, right))
        return f"{before}|{_drawn(bar)}|{after}"

    def settled(self, bundle: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """What is to stand in the end in the place of a mime bundle; None: it stays."""
        text = self.text(bundle)
        if not text:
            return None if text is None else []
        outputs = self._models[model_id(bundle)].get("outputs") or [{"text": text}]
        shown = [output.get("data") or {"text/plain": text_of([output])} for output in outputs]
        return [{**bundle, "data": data} for data in shown if data.get("text/plain", "x").strip()]

    def _have_controls(self) -> bool:
        names = {str(model.get("_model_name", "")) for model in self._models.values()}
        kinds = {name.removesuffix("Model") for name in names if name}
        return any(kind not in _PASSIVE and not kind.endswith("Style") for kind in kinds)


class WidgetRelay:
    """Passes messages between the front end and the ranks' widgets."""

    def __init__(self, place: Place, send_comm: SendComm) -> None:
        self._place = place
        self._send_comm = send_comm

    def take(self, rank: int, message: Mapping[str, Any]) -> None:
        """A message of a rank's widget, for the front end. Called in a background thread."""
        shell: Any = get_ipython()
        comms = shell.kernel.comm_manager
        comm_id = message["content"]["comm_id"]
        if message["type"] == "comm_open":
            comms.register_comm(self._stand_in(rank, message["content"]))
        elif message["type"] == "comm_close" and comms.get_comm(comm_id) is not None:
            comms.unregister_comm(comms.get_comm(comm_id))
        self._place.send(
            message["type"], message["content"], message["metadata"], message["buffers"]
        )

    def _stand_in(self, rank: int, content: Mapping[str, Any]) -> Any:
        """What the kernel takes for the widget: it hands on what the front end says."""
        from ipykernel.comm import Comm

        make: Any = Comm  # it annotates nothing
        name = content.get("target_name", "")
        comm = make(comm_id=content["comm_id"], target_name=name, primary=False)

        def hand_on(message: Mapping[str, Any]) -> None:
            self._send_comm(
                rank,
                {
                    "type": message["header"]["msg_type"],
                    "content": message["content"],
                    "metadata": message["metadata"],
                    "buffers": message["buffers"],
                },
            )

        comm.on_msg(hand_on)
        comm.on_close(hand_on)
        return comm


def settle_bars(output: RankOutput, bars: Bars) -> None:
    """Put the last state of progress bars, as text, in the place of what showed them."""
    settled = []
    for bundle in output.displays:
        instead = bars.settled(bundle)
        settled += [bundle] if instead is None else instead
    output.displays[:] = settled


def is_widget(bundle: Mapping[str, Any]) -> bool:
    """Whether a mime bundle shows a widget."""
    return bool(model_id(bundle))


def _drawn(bar: Mapping[str, Any]) -> str:
    low, high, value = (float(bar.get(key) or 0.0) for key in ("min", "max", "value"))
    share = min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0
    full = round(10 * share)
    return "█" * full + " " * (10 - full)


def _text_of(value: object) -> str:
    return html.unescape(str(value or "")).translate(_SPACES)
