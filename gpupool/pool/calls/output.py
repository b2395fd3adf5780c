"""What the ranks of a call show (kept, bounded, masked), and what it gives. Runs on the client."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from gpupool.core.errors import PoolError
from gpupool.core.formatting import rank_count
from gpupool.core.wire.masking import Redactor, Secrets, redact_all
from gpupool.core.wire.output import STREAMS, OnOutput, OutputKind
from gpupool.core.wire.pickles import unpack
from gpupool.core.wire.replies import CodeReply
from gpupool.pool.calls.terminal_text import as_shown
from gpupool.pool.engines.client import unheard_output

HEAD_CHARS = 200_000  # per rank and call, of the beginning: a notebook keeps all results (`Out`)
LAST_CHARS = 800_000  # and of the end; what lies between is dropped
SHOWN = (*STREAMS, OutputKind.DISPLAY, OutputKind.RESULT)  # what takes the place of cleared output
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
        self.clears = False
        self.displays: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._num_kept = self._num_left_out = 0

    def add(self, kind: OutputKind, content: Any) -> None:
        if kind is OutputKind.UPDATE:
            new = {key: content.get(key) or {} for key in ("data", "metadata")}
            for display in self.displays:
                if display["display_id"] == _name(content):
                    display.update(new)
        elif kind is OutputKind.CLEAR and content.get("wait"):
            self.clears = True
        elif kind is OutputKind.CLEAR or (self.clears and kind in SHOWN):
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
        self._hidden, self._listener = hidden, listener
        self._lock = threading.Lock()

    def __call__(self, rank: int, kind: OutputKind, content: Any) -> None:
        """Add a message of a rank; called in ipyparallel's IO thread."""
        with self._lock:
            if kind in STREAMS:
                self._add(rank, kind, self._redactors[rank, kind].feed(content))
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
        if output.clears and kind in SHOWN:
            self._listener(rank, OutputKind.CLEAR, {"wait": False})
        output.add(kind, content)
        self._listener(rank, kind, content)


class SpmdResult(Mapping[int, Any]):
    """One value per rank, and what each printed.

    `result[rank]` is the function's return value, or the value of the cell's last expression;
    `outputs[rank]` is what the rank has shown. `cell_number` is the notebook's number of the cell,
    None for what is no cell of it.
    """

    def __init__(
        self,
        replies: Mapping[int, CodeReply],
        outputs: Mapping[int, RankOutput],
        elapsed_s: float,
        cell_number: int | None = None,
    ) -> None:
        self.elapsed_s, self.cell_number = elapsed_s, cell_number
        # The notebook's number of the cell that has shown it, and what of it; set by a view.
        self.shown: tuple[int, Any] = (-1, "nothing")
        self.outputs = dict(sorted(outputs.items()))
        self._replies = dict(sorted(replies.items()))
        self._values: dict[int, Any] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that ran."""
        return tuple(self._replies)

    def __getitem__(self, rank: int) -> Any:
        if rank not in self._values:
            reply = self._reply(rank)
            if reply.packed is None and reply.text:
                raise PoolError(
                    f"the value of rank {rank} stays there: it cannot be pickled, or is larger "
                    "than a cell sends along. Its text is result.value_text(rank); pool.run with a "
                    "function returns values of any size.",
                    ranks=[rank],
                )
            self._values[rank] = unpack(reply.packed) if reply.packed else None
        return self._values[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._replies)

    def __len__(self) -> int:
        return len(self._replies)

    def text(self, rank: int) -> str:
        """What the rank printed, stdout and stderr together, also after the call had ended."""
        self._reply(rank)
        return self.outputs[rank].text

    def value_text(self, rank: int) -> str:
        """The repr of the rank's value; empty where it is None."""
        return self._reply(rank).text

    def rank_elapsed_s(self, rank: int) -> float:
        """Seconds the code took on the rank."""
        return self._reply(rank).elapsed_s

    def _reply(self, rank: int) -> CodeReply:
        if rank not in self._replies:
            listed = ", ".join(map(str, self._replies))
            raise PoolError(
                f"rank {rank} did not take part in this run; these did: {listed}.", ranks=[rank]
            )
        return self._replies[rank]

    def __repr__(self) -> str:
        return f"SpmdResult({rank_count(len(self))}, {self.elapsed_s:.2f} s)"
