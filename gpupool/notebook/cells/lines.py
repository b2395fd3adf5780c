"""The ranks' text as lines while it comes: cut, and equal ones of several ranks together."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping

from gpupool.notebook.page import ansi
from gpupool.pool.calls.terminal_text import line_as_shown
from gpupool.spmd.output import format_ranks

FOLD_WITHIN_S = 0.5  # a line that several ranks say within that time is shown once

_VARYING = re.compile(r"[\d█▉▊▋▌▍▎▏#=>.:,%/?\s]+")


class Lines:
    """Cuts each rank's stream into lines; the unfinished last one waits for its end.

    Args:
        max_chars: of a line; what is longer is cut.
        num_last: of the lines that a piece completes only so many, the last, are of interest.
    """

    def __init__(self, max_chars: int | None = None, num_last: int = 0) -> None:
        self._max_chars = max_chars
        self._num_last = num_last
        self._open: dict[int, str] = {}

    def feed(self, rank: int, text: str) -> list[str]:
        """The lines that this piece completes; of a redrawn progress bar the last state."""
        *lines, rest = (self._open.get(rank, "") + text.replace("\r\n", "\n")).split("\n")
        # A last "\r" is kept: what comes next is drawn over the line, or is a "\n".
        self._open[rank] = self._as_drawn(rest) + ("\r" if rest.endswith("\r") else "")
        # -0 is 0: without a number the slice has all lines.
        return [self._as_drawn(line) for line in lines[-self._num_last :]]

    def partial(self) -> list[tuple[int, str]]:
        """The unfinished lines as they look now."""
        return [(rank, self._as_drawn(line)) for rank, line in sorted(self._open.items()) if line]

    def rest(self, rank: int) -> list[str]:
        """The unfinished line of a rank, for good."""
        line = self._open.pop(rank, "")
        return [self._as_drawn(line)] if line else []

    def clear(self, rank: int) -> None:
        """Forget the unfinished line of a rank."""
        self._open.pop(rank, None)

    def _as_drawn(self, line: str) -> str:
        # Cut last: what a carriage return has drawn over does not count.
        return ansi.without_moves(line_as_shown(line))[: self._max_chars]


class Merger:
    """Lines of several ranks in the order in which they come, equal ones once.

    A rank's line waits a moment for the same line of the others; the order of the lines of each
    rank stays.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._waiting: dict[int, deque[tuple[float, str]]] = {rank: deque() for rank in ranks}

    def add(self, rank: int, line: str, now: float) -> None:
        """Add a line; `now` in seconds."""
        self._waiting.setdefault(rank, deque()).append((now, line))

    def due(self, now: float, *, at_end: bool = False) -> list[tuple[tuple[int, ...], str]]:
        """The lines that need not wait longer, with their ranks; `at_end` all."""
        shown: list[tuple[tuple[int, ...], str]] = []
        while True:
            heads = {rank: lines[0] for rank, lines in self._waiting.items() if lines}
            if not heads:
                return shown
            # Only the first line of each rank is looked at, so the order within a rank stays.
            first = min(heads, key=lambda rank: (heads[rank][0], rank))
            since, line = heads[first]
            same = tuple(rank for rank, head in heads.items() if head[1] == line)
            all_there = len(same) == len(self._waiting)
            if not (all_there or at_end or now - since >= FOLD_WITHIN_S):
                return shown
            shown.append((tuple(sorted(same)), line))
            for rank in same:
                self._waiting[rank].popleft()


def merge(tails: Mapping[int, Iterable[tuple[float, str]]]) -> list[tuple[tuple[int, ...], str]]:
    """Lines by rank, each with its time, in order of time; equal ones of several ranks once."""
    merger = Merger(tails)
    for rank, lines in tails.items():
        for since, line in lines:
            merger.add(rank, line, since)
    # At the end nothing waits, so the time now does not matter.
    return merger.due(0.0, at_end=True)


def fold_bars(lines: Iterable[tuple[int, str]]) -> list[str]:
    """Unfinished lines, one each; of similar ones (progress bars) only the first rank's.

    >>> fold_bars([(0, " 40%|##   | 2/5"), (1, " 60%|###  | 3/5"), (2, "other")])
    ['[0]  40%|##   | 2/5  (rank 1 alike)', '[2] other']
    """
    groups: dict[str, list[tuple[int, str]]] = {}
    for rank, line in lines:
        groups.setdefault(_VARYING.sub("~", ansi.plain(line)), []).append((rank, line))
    shown = []
    for members in groups.values():
        (rank, line), *others = members
        note = ""
        if others:
            word = "ranks" if len(others) > 1 else "rank"
            note = f"  ({word} {format_ranks(r for r, _ in others)} alike)"
        shown.append(f"[{rank}] {line}{note}")
    return shown
