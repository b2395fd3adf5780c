"""What the ranks show while a call runs, and later: kept, bounded, masked. Runs on the client."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from gpupool.core.wire.masking import Redactor, Secrets, redact_all
from gpupool.core.wire.output import STREAMS, OnOutput, OutputKind
from gpupool.pool.calls.terminal_text import as_shown
from gpupool.pool.engines.iopub import unheard_output

HEAD_CHARS = 200_000  # per rank and call, of the beginning: a notebook keeps all results (`Out`)
LAST_CHARS = 800_000  # and of the end; what lies between is dropped
MAX_DISPLAYS = 200  # per rank and call; beyond, the oldest is dropped


class RankOutput:
    """What one rank has shown so far: its text in order of arrival, and its figures.

    `displays` holds mime bundles, those of display() and of last values: {"kind": "display" or
    "result", "data": ..., "metadata": ..., "display_id": its name or None, "at": how many
    characters of text came before it}. `clears`: the next output takes the place of all that is
    there.
    """

    __slots__ = ("_num_kept", "_num_left_out", "_texts", "clears", "displays")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything shown so far."""
        self.clears = False
        self.displays: list[dict[str, Any]] = []
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
        if kind in STREAMS:
            self._texts.append(content)
            self._num_kept += len(content)
            if self._num_kept > 2 * (HEAD_CHARS + LAST_CHARS):
                self._shorten()
        elif kind in (OutputKind.DISPLAY, OutputKind.RESULT):
            self.displays.append(
                {
                    "kind": kind.value,
                    "data": content["data"],
                    "metadata": content.get("metadata") or {},
                    "display_id": _name(content),
                    "at": self._num_kept + self._num_left_out,
                }
            )
            del self.displays[:-MAX_DISPLAYS]

    @property
    def text(self) -> str:
        """The text with carriage returns applied, as a terminal leaves it: progress bars once."""
        return as_shown("".join(self._shorten()))

    def pieces(self) -> list[str | dict[str, Any]]:
        """Text and figures in the order in which they came; texts as in `text`."""
        head, gap, tail = self._shorten()
        text, num_inserted = head + gap + tail, len(gap) - self._num_left_out
        pieces: list[str | dict[str, Any]] = []
        start = 0
        for bundle in (*self.displays, None):
            end = len(text)
            if bundle is not None:  # one of those that were left out stands behind the gap
                at = bundle["at"]
                moved = max(at + num_inserted, len(head) + len(gap))
                end = at if at <= len(head) else moved
            if end > start:
                pieces.append(as_shown(text[start:end]))
            if bundle is not None:
                pieces.append(bundle)
            start = end
        return pieces

    def _shorten(self) -> tuple[str, str, str]:
        """Let go what is too much; the beginning, what is said of the gap, and the end."""
        text = "".join(self._texts)
        num_too_many = max(0, len(text) - HEAD_CHARS - LAST_CHARS)
        self._num_left_out += num_too_many
        head, tail = text[:HEAD_CHARS], text[HEAD_CHARS + num_too_many :]
        self._texts, self._num_kept = [head, tail], len(head) + len(tail)
        gap = f"\n[... {self._num_left_out} characters left out ...]\n"
        return head, gap if self._num_left_out else "", tail

    def _update_display(self, content: Mapping[str, Any]) -> None:
        """Put a mime bundle in the place of those of its name."""
        new = {key: content.get(key) or {} for key in ("data", "metadata")}
        for display in self.displays:
            if display["display_id"] == _name(content):
                display.update(new)


def _name(content: Mapping[str, Any]) -> str | None:
    name: str | None = (content.get("transient") or {}).get("display_id")
    return name


class OutputRecorder:
    """Collects what every rank shows during a run, with the hidden values masked.

    Values that become known during the run are masked from then on.
    `listener(rank, kind, content)` is called with each piece after it was masked and kept; of a
    display that changes an earlier one as "update", of one that is to be cleared as "clear". Events
    are passed on to it, masked, and not kept.
    """

    def __init__(
        self, ranks: tuple[int, ...], hidden: Secrets, listener: OnOutput = unheard_output
    ) -> None:
        self.outputs = {rank: RankOutput() for rank in ranks}
        self._redactors = {(rank, stream): Redactor(hidden) for rank in ranks for stream in STREAMS}
        self._hidden = hidden
        self._listener = listener
        self._lock = threading.Lock()

    def __call__(self, rank: int, kind: OutputKind, content: Any) -> None:
        """Add a message of a rank; called in ipyparallel's IO thread."""
        with self._lock:
            if kind in STREAMS:
                self._add(rank, kind, self._redactors[rank, kind].feed(content))
            elif kind is OutputKind.EVENTS:
                self._listener(rank, kind, redact_all(content, self._hidden))
            else:
                self._add(rank, kind, redact_all(content, self._hidden))

    def text(self, rank: int) -> str:
        """What a rank has printed so far; it may be printing."""
        with self._lock:
            return self.outputs[rank].text

    def finish(self) -> None:
        """Give out what was held back. What comes later, of threads say, is taken in as well."""
        with self._lock:
            for (rank, kind), redactor in self._redactors.items():
                self._add(rank, kind, redactor.feed("", is_last=True))

    def _add(self, rank: int, kind: OutputKind, content: Any) -> None:
        if kind in STREAMS and not content:
            return
        output = self.outputs[rank]
        if output.clears and kind not in (OutputKind.CLEAR, OutputKind.UPDATE):
            self._listener(rank, OutputKind.CLEAR, {"wait": False})
        output.add(kind, content)
        self._listener(rank, kind, content)
