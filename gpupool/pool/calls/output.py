"""What the ranks show while a call runs, and later: kept, bounded, masked. Runs on the client."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from gpupool.core.wire.masking import Redactor, Secrets, redact_all
from gpupool.core.wire.output import STREAMS, OnOutput, OutputKind
from gpupool.pool.calls.output_widgets import Widgets
from gpupool.pool.calls.terminal_text import as_shown

HEAD_CHARS = 200_000  # per rank and call, of the beginning: a notebook keeps all results (`Out`)
LAST_CHARS = 800_000  # and of the end; what lies between is dropped
MAX_DISPLAYS = 200  # per rank and call; beyond, the oldest is dropped

_SHOWN = (OutputKind.DISPLAY, OutputKind.RESULT, OutputKind.UPDATE)
_COLLECTED = (OutputKind.DISPLAY, OutputKind.RESULT, OutputKind.CLEAR)  # by an Output of ipywidgets


class RankOutput:
    """What one rank has shown so far: its text in order of arrival, and its figures.

    `displays` holds mime bundles: {"kind": "display" or "result", "data": ..., "metadata": ...,
    "display_id": its name or None, "widget": the name of the widget whose text it is, or "", "at":
    how many characters of text came before it}, those of display() and of last values.
    """

    __slots__ = (
        "_head",
        "_last",
        "_num_head",
        "_num_last",
        "_num_left_out",
        "displays",
    )

    def __init__(self) -> None:
        self.displays: list[dict[str, Any]] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything shown so far."""
        self._head: list[str] = []
        self._last: deque[str] | None = None
        self._num_head = self._num_last = self._num_left_out = 0
        self.displays.clear()

    def add_text(self, text: str) -> None:
        """Add a piece of text; memory stays bounded."""
        if self._num_head < HEAD_CHARS:
            self._head.append(text[: HEAD_CHARS - self._num_head])
            text = text[HEAD_CHARS - self._num_head :]
            self._num_head += len(self._head[-1])
        if not text:
            return
        if self._last is None:
            self._last = deque()
        self._last.append(text[-LAST_CHARS:])
        self._num_left_out += max(0, len(text) - LAST_CHARS)
        self._num_last += len(self._last[-1])
        while self._num_last > LAST_CHARS:
            oldest = self._last.popleft()
            too_many = self._num_last - LAST_CHARS
            if len(oldest) > too_many:
                self._last.appendleft(oldest[too_many:])
            self._num_left_out += min(len(oldest), too_many)
            self._num_last -= min(len(oldest), too_many)

    def add_display(self, kind: OutputKind, content: Mapping[str, Any]) -> None:
        """Add a mime bundle."""
        self.displays.append(
            {
                "kind": kind.value,
                "data": content["data"],
                "metadata": content.get("metadata") or {},
                "display_id": (content.get("transient") or {}).get("display_id"),
                "widget": content.get("widget", ""),
                "at": self._num_chars,
            }
        )
        if len(self.displays) > MAX_DISPLAYS:
            del self.displays[0]

    def update_display(self, content: Mapping[str, Any]) -> bool:
        """Put a mime bundle in the place of those of its name; returns whether there were any."""
        display_id = (content.get("transient") or {}).get("display_id")
        places = [n for n, d in enumerate(self.displays) if d["display_id"] == display_id]
        new = {key: content.get(key) or {} for key in ("data", "metadata")}
        for n in places:
            self.displays[n] = {**self.displays[n], **new, "widget": content.get("widget", "")}
        return bool(places)

    @property
    def text(self) -> str:
        """The text with carriage returns applied, as a terminal leaves it: progress bars once."""
        return as_shown("".join(self._parts()))

    def pieces(self) -> list[str | dict[str, Any]]:
        """Text and figures in the order in which they came; texts as in `text`."""
        head, gap, last = self._parts()
        text = head + gap + last

        def index(position: int) -> int:
            """Where in `text` a position is, counted in all that the rank has written."""
            if position <= self._num_head:
                return position
            after = position - self._num_head - self._num_left_out
            return len(head) + len(gap) + max(0, after)

        pieces: list[str | dict[str, Any]] = []
        start = 0
        for bundle in (*self.displays, None):
            end = len(text) if bundle is None else max(start, index(bundle["at"]))
            if end > start:
                pieces.append(as_shown(text[start:end]))
            if bundle is not None:
                pieces.append(bundle)
            start = end
        return pieces

    def _parts(self) -> tuple[str, str, str]:
        gap = f"\n[... {self._num_left_out} characters left out ...]\n"
        has_gap = bool(self._num_left_out)
        return "".join(self._head), gap * has_gap, "".join(self._last or ())

    @property
    def _num_chars(self) -> int:
        """How much text has come, that which was left out included."""
        return self._num_head + self._num_left_out + self._num_last


class OutputRecorder:
    """Collects what every rank shows during a run, with the hidden values masked.

    Values that become known during the run are masked from then on.
    `listener(rank, kind, content)` is called with each piece after it was masked and kept; of a
    display that changes an earlier one as "update", of one that is to be cleared as "clear", of a
    widget whose text has changed as "widget". Events are passed on to it, masked, and not kept.
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
        self._to_clear: set[int] = set()
        self._widgets = {rank: Widgets() for rank in ranks}
        self._lock = threading.Lock()

    def __call__(self, rank: int, kind: OutputKind, content: Any) -> None:
        """Add a message of a rank; called in ipyparallel's IO thread."""
        with self._lock:
            if kind.is_text:
                self._text(rank, kind, self._redactors[rank, kind].feed(content))
                return
            content, widgets = redact_all(content, self._hidden), self._widgets[rank]
            if kind is OutputKind.COMM:
                self._update_widget(rank, widgets.note(content))
            elif kind in _COLLECTED and widgets.is_collecting:
                self._update_widget(rank, widgets.collect(kind, content))
            elif kind in _SHOWN:
                text = widgets.text(content.get("widget", ""))
                data = content["data"] if text is None else {"text/plain": text}
                self._show(rank, kind, {**content, "data": data})
            elif kind in (OutputKind.CLEAR, OutputKind.EVENTS):
                if kind is OutputKind.CLEAR:
                    self._clear(rank, wait=bool(content.get("wait")))
                self._notify(rank, kind, content)

    def finish(self) -> None:
        """Give out what was held back. What comes later, of threads say, is taken in as well."""
        with self._lock:
            for (rank, kind), redactor in self._redactors.items():
                self._text(rank, kind, redactor.flush())

    def _show(self, rank: int, kind: OutputKind, content: dict[str, Any]) -> None:
        if kind is OutputKind.UPDATE:
            self.outputs[rank].update_display(content)
        else:
            self._clear_if_due(rank)
            self.outputs[rank].add_display(kind, content)
        self._notify(rank, kind, content)

    def _clear(self, rank: int, *, wait: bool) -> None:
        if wait:  # the next output clears what is there
            self._to_clear.add(rank)
        else:
            self.outputs[rank].clear()

    def _update_widget(self, rank: int, name: str) -> None:
        """Show where a widget is displayed what it shows now: of an Output each figure."""
        shown = self._widgets[rank].shown(name)
        displays = self.outputs[rank].displays
        if shown is None or not any(bundle["widget"] == name for bundle in displays):
            return
        before, displays[:] = list(displays), []
        for bundle in before:
            if bundle["widget"] != name:
                displays.append(bundle)
            elif not displays or displays[-1]["widget"] != name:
                # one that shows nothing keeps its place: it may be filled later
                displays += [{**bundle, "data": data} for data in shown or [{}]]
        text = {"text/plain": self._widgets[rank].text(name)}
        self._notify(rank, OutputKind.WIDGET, {"widget": name, "data": text})

    def _text(self, rank: int, kind: OutputKind, text: str) -> None:
        if text and self._widgets[rank].is_collecting:
            self._update_widget(rank, self._widgets[rank].collect(kind, text))
        elif text:
            self._clear_if_due(rank)
            self.outputs[rank].add_text(text)
            self._notify(rank, kind, text)

    def _clear_if_due(self, rank: int) -> None:
        if rank in self._to_clear:
            self._to_clear.discard(rank)
            self.outputs[rank].clear()
            self._notify(rank, OutputKind.CLEAR, {"wait": False})

    def _notify(self, rank: int, kind: OutputKind, content: Any) -> None:
        if self._listener is not None:
            self._listener(rank, kind, content)
