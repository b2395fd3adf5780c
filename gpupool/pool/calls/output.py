"""What the ranks show while a call runs, and later: kept, bounded, masked. Runs on the client."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from gpupool.core.wire.masking import Redactor, Secrets, redact_all
from gpupool.core.wire.output import STREAMS, OnOutput, OutputKind
from gpupool.pool.calls.terminal_text import as_shown

HEAD_CHARS = 200_000  # per rank and call, of the beginning: a notebook keeps all results (`Out`)
LAST_CHARS = 800_000  # and of the end; what lies between is dropped
MAX_DISPLAYS = 200  # per rank and call; beyond, the oldest is dropped


class RankOutput:
    """What one rank has shown so far: its text in order of arrival, and its figures.

    `displays` holds mime bundles: {"kind": "display" or "result", "data": ..., "metadata": ...,
    "display_id": its name or None, "widget": the name of the Output of ipywidgets that it stands
    in, or "", "at": how many characters of text came before it}, those of display() and of last
    values. `clears`: the next output takes the place of all that is there.
    """

    __slots__ = ("_num_kept", "_num_left_out", "_texts", "clears", "displays")

    def __init__(self) -> None:
        self.displays: list[dict[str, Any]] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything shown so far."""
        self.clears = False
        self.displays.clear()
        self._texts: list[str] = []
        self._num_kept = self._num_left_out = 0

    def add(self, kind: OutputKind, content: Any) -> None:
        """Add what the rank has shown, or have it clear or change what it has shown before."""
        if kind is OutputKind.UPDATE:
            self._update_display(content)
        elif kind is OutputKind.CLEAR and content.get("wait"):
            self.clears = True
        elif kind is OutputKind.CLEAR or self.clears:
            self.clear()
        if kind.is_text:
            self.add_text(content)
        elif kind in (OutputKind.DISPLAY, OutputKind.RESULT):
            self.add_display(kind, content)

    def add_text(self, text: str) -> None:
        """Add a piece of text; memory stays bounded."""
        self._texts.append(text)
        self._num_kept += len(text)
        if self._num_kept > 2 * (HEAD_CHARS + LAST_CHARS):
            self._kept_text()

    def add_display(self, kind: OutputKind, content: Mapping[str, Any]) -> None:
        """Add a mime bundle."""
        self.displays.append(
            {
                "kind": kind.value,
                "data": content["data"],
                "metadata": content.get("metadata") or {},
                "display_id": (content.get("transient") or {}).get("display_id"),
                "widget": content.get("widget", ""),
                "at": self._num_kept + self._num_left_out,
            }
        )
        del self.displays[:-MAX_DISPLAYS]

    @property
    def text(self) -> str:
        """The text with carriage returns applied, as a terminal leaves it: progress bars once."""
        text = self._kept_text()
        return as_shown(self._with_gap(text, 0, len(text)))

    def pieces(self) -> list[str | dict[str, Any]]:
        """Text and figures in the order in which they came; texts as in `text`."""
        pieces: list[str | dict[str, Any]] = []
        text, start = self._kept_text(), 0
        for bundle in (*self.displays, None):
            end = len(text) if bundle is None else max(start, self._place(bundle["at"]))
            if end > start:
                pieces.append(as_shown(self._with_gap(text, start, end)))
            if bundle is not None:
                pieces.append(bundle)
            start = end
        return pieces

    def _kept_text(self) -> str:
        """The text that is kept, its beginning and its end; what lies between is let go."""
        text = "".join(self._texts)
        num_too_many = len(text) - HEAD_CHARS - LAST_CHARS
        if num_too_many > 0:
            text = text[:HEAD_CHARS] + text[-LAST_CHARS:]
            self._num_left_out += num_too_many
        self._texts, self._num_kept = [text], len(text)
        return text

    def _place(self, position: int) -> int:
        """Where in the text that is kept a position is, counted in all that has come."""
        after = max(HEAD_CHARS, position - self._num_left_out)
        return position if position <= HEAD_CHARS else after

    def _with_gap(self, text: str, start: int, end: int) -> str:
        """This part of the text that is kept; where some was left out it is said."""
        if not self._num_left_out or not start <= HEAD_CHARS < end:
            return text[start:end]
        gap = f"\n[... {self._num_left_out} characters left out ...]\n"
        return text[start:HEAD_CHARS] + gap + text[HEAD_CHARS:end]

    def _update_display(self, content: Mapping[str, Any]) -> None:
        """Put a mime bundle in the place of those of its name."""
        display_id = (content.get("transient") or {}).get("display_id")
        new = {key: content.get(key) or {} for key in ("data", "metadata")}
        for n, display in enumerate(self.displays):
            if display["display_id"] == display_id:
                self.displays[n] = {**display, **new}


class OutputRecorder:
    """Collects what every rank shows during a run, with the hidden values masked.

    Values that become known during the run are masked from then on.
    `listener(rank, kind, content)` is called with each piece after it was masked and kept; of a
    display that changes an earlier one as "update", of one that is to be cleared as "clear", of an
    Output of ipywidgets whose text has changed as "widget". Events are passed on to it, masked,
    and not kept.

    An Output collects what a rank shows inside `with output:`. Live displays of rich are such
    Outputs. The rank knows its own call alone, not the notebook's message by whose name an Output
    collects, so this is done here. Any other widget shows its text, which does not change.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        hidden: Secrets,
        listener: OnOutput | None = None,
    ) -> None:
        self.outputs = {rank: RankOutput() for rank in ranks}
        self._redactors = {(rank, stream): Redactor(hidden) for rank in ranks for stream in STREAMS}
        self._hidden = hidden
        self._listener = listener
        self._widgets: dict[tuple[int, str], RankOutput] = {}  # what stands in each Output
        self._collecting: dict[int, list[str]] = {rank: [] for rank in ranks}  # the innermost last
        self._lock = threading.Lock()

    def __call__(self, rank: int, kind: OutputKind, content: Any) -> None:
        """Add a message of a rank; called in ipyparallel's IO thread."""
        with self._lock:
            if kind.is_text:
                self._add(rank, kind, self._redactors[rank, kind].feed(content))
                return
            content = redact_all(content, self._hidden)
            if kind is OutputKind.EVENTS:
                self._notify(rank, kind, content)
            elif kind is OutputKind.COMM:
                self._note_widget(rank, content)
            else:
                if (rank, content.get("widget")) not in self._widgets:
                    content.pop("widget", None)
                self._add(rank, kind, content)

    def finish(self) -> None:
        """Give out what was held back. What comes later, of threads say, is taken in as well."""
        with self._lock:
            for (rank, kind), redactor in self._redactors.items():
                self._add(rank, kind, redactor.feed("", is_last=True))

    def _add(self, rank: int, kind: OutputKind, content: Any) -> None:
        if kind.is_text and not content:
            return
        if self._collecting[rank] and kind is not OutputKind.UPDATE:
            name = self._collecting[rank][-1]
            self._widgets[rank, name].add(kind, content)
            self._show_widget(rank, name)
            return
        output = self.outputs[rank]
        if output.clears and kind not in (OutputKind.CLEAR, OutputKind.UPDATE):
            self._notify(rank, OutputKind.CLEAR, {"wait": False})
        output.add(kind, content)
        if not kind.is_text and content.get("widget"):
            self._show_widget(rank, content["widget"])
        else:
            self._notify(rank, kind, content)

    def _note_widget(self, rank: int, message: Mapping[str, Any]) -> None:
        """Note what a rank says of its widgets, if it is an Output."""
        content = message["content"]
        name, state = content["comm_id"], (content.get("data") or {}).get("state") or {}
        if message["type"] == "comm_open" and state.get("_model_name") == "OutputModel":
            self._widgets[rank, name] = RankOutput()
        if (rank, name) not in self._widgets:
            return
        if message["type"] == "comm_close":  # of a live display that leaves nothing behind
            self._widgets[rank, name].clear()
            self._show_widget(rank, name)
        if "msg_id" in state:  # the rank enters its `with`, or leaves it
            others = [one for one in self._collecting[rank] if one != name]
            self._collecting[rank] = [*others, name] if state["msg_id"] else others

    def _show_widget(self, rank: int, name: str) -> None:
        """Show where an Output is displayed what stands in it now."""
        pieces = self._widgets[rank, name].pieces()
        shown = [
            {"text/plain": piece.rstrip("\n")} if isinstance(piece, str) else piece["data"]
            for piece in pieces
            if not isinstance(piece, str) or piece.strip()
        ]
        displays = self.outputs[rank].displays
        if not any(bundle["widget"] == name for bundle in displays):
            return
        before, displays[:] = list(displays), []
        for bundle in before:
            if bundle["widget"] != name:
                displays.append(bundle)
            elif not displays or displays[-1]["widget"] != name:
                # one that shows nothing keeps its place: it may be filled later
                displays += [{**bundle, "data": data} for data in shown or [{}]]
        text = "\n".join(str(data.get("text/plain", "")) for data in shown)
        self._notify(rank, OutputKind.WIDGET, {"widget": name, "data": {"text/plain": text}})

    def _notify(self, rank: int, kind: OutputKind, content: Any) -> None:
        if self._listener is not None:
            self._listener(rank, kind, content)
