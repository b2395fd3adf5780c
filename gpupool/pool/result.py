"""What a cell or function left on each rank. Runs on the client; draws nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpupool.core.errors import PoolError
from gpupool.core.masking import Redactor, Secrets, redact_all
from gpupool.core.parcels import unpack

MAX_TEXT_CHARS = 10_000_000  # per rank; beyond, the oldest output is let go
LEFT_OUT = "[... earlier output left out ...]\n"


@dataclass
class RankOutput:
    """What one rank has shown so far: its text in order of arrival, and its figures.

    `displays` holds mime bundles ({"data": ..., "metadata": ...}) of display() and of last values.
    """

    chunks: deque[str] = field(default_factory=deque)
    displays: list[dict[str, Any]] = field(default_factory=list)
    truncated: bool = False
    _num_chars: int = 0

    def add_text(self, text: str) -> None:
        """Take in a piece of text; memory stays bounded."""
        if len(text) > MAX_TEXT_CHARS:  # what was printed in one go comes in one message
            text = text[-MAX_TEXT_CHARS:]
            self.truncated = True
        self.chunks.append(text)
        self._num_chars += len(text)
        while self._num_chars > MAX_TEXT_CHARS:
            self._num_chars -= len(self.chunks.popleft())
            self.truncated = True

    @property
    def text(self) -> str:
        """The text with carriage returns applied, as a terminal leaves it: progress bars once."""
        joined = (LEFT_OUT if self.truncated else "") + "".join(self.chunks)
        if "\r" not in joined:
            return joined
        joined = joined.replace("\r\n", "\n")
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in joined.split("\n"))


class SpmdResult(Mapping[int, Any]):
    """One value per rank, and what each printed.

    `result[rank]` is the function's return value, or the value of the cell's last expression.
    """

    def __init__(
        self,
        replies: Mapping[int, dict[str, Any]],
        outputs: Mapping[int, RankOutput],
        elapsed_s: float,
    ) -> None:
        self.elapsed_s = elapsed_s
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
            if reply["value"] is None and reply["text"]:
                raise PoolError(
                    f"the value of rank {rank} stays there: it cannot be pickled, or is larger "
                    "than a cell sends along. Its text is result.value_text(rank); pool.run with a "
                    "function returns values of any size."
                )
            pickled = reply["value"]
            self._values[rank] = None if pickled is None else unpack(pickled)
        return self._values[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._replies)

    def __len__(self) -> int:
        return len(self._replies)

    def text(self, rank: int) -> str:
        """What the rank printed, stdout and stderr together."""
        self._reply(rank)
        return self.outputs[rank].text

    def value_text(self, rank: int) -> str:
        """The repr of the rank's value; empty where it is None."""
        return str(self._reply(rank)["text"])

    def rank_elapsed_s(self, rank: int) -> float:
        """Seconds the code took on the rank."""
        return float(self._reply(rank)["elapsed_s"])

    def _reply(self, rank: int) -> dict[str, Any]:
        if rank not in self._replies:
            listed = ", ".join(map(str, self._replies))
            raise PoolError(f"rank {rank} did not take part in this run; these did: {listed}.")
        return self._replies[rank]

    def __repr__(self) -> str:
        return f"SpmdResult({len(self)} ranks, {self.elapsed_s:.2f} s)"


class OutputRecorder:
    """Collects what every rank shows during a run, with the hidden values masked.

    Values that become known during the run are masked from then on.
    `listener(rank, kind, content)` is told of each piece after it was masked and kept.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        hidden: Secrets,
        listener: Callable[[int, str, Any], None] | None = None,
    ) -> None:
        self.outputs = {rank: RankOutput() for rank in ranks}
        self._redactors = {
            (rank, kind): Redactor(hidden) for rank in ranks for kind in ("stdout", "stderr")
        }
        self._hidden = hidden
        self._listener = listener

    def __call__(self, rank: int, kind: str, content: Any) -> None:
        """Take in a message of a rank; called in ipyparallel's IO thread."""
        if kind in ("stdout", "stderr"):
            self._text(rank, kind, self._redactors[rank, kind].feed(content))
        elif kind in ("display", "result"):
            content = redact_all(content, self._hidden)
            self.outputs[rank].displays.append({"kind": kind, **content})
            self._notify(rank, kind, content)

    def finish(self) -> None:
        """Give out what was held back; nothing comes after this."""
        for (rank, kind), redactor in self._redactors.items():
            self._text(rank, kind, redactor.flush())

    def _text(self, rank: int, kind: str, text: str) -> None:
        if text:
            self.outputs[rank].add_text(text)
            self._notify(rank, kind, text)

    def _notify(self, rank: int, kind: str, content: Any) -> None:
        if self._listener is not None:
            self._listener(rank, kind, content)
