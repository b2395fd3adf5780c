"""The ranks' text as lines while it comes: cut, and equal ones of several ranks together."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping

from gpupool.core.formatting import format_ranks
from gpupool.notebook.page import ansi
from gpupool.pool.calls.terminal_text import as_shown, goes_up, line_as_shown, on_screen

FOLD_WITHIN_S = 0.5  # a line that several ranks say within that time is shown once

_SCREEN_LINES = 64  # the cursor goes up and down between so many
_BEGUN_CODE = re.compile(r"\x1b(?:\[[0-9;]{0,20})?\Z")  # the rest of it comes with the next piece
_NUMBER = re.compile(r"\d+")
# tqdm's: "epoch:  40%|##   | 2/5 [00:01<00:02,  1.6it/s]", or "12it [00:01, 9.8it/s]"
_BAR = re.compile(r"(?P<name>.*?)(?:(?P<percent>\d{1,3})%\||(?<!\S)(?P<count>\d+)it (?=\[))")


class Lines:
    """Cuts each rank's stream into lines; the unfinished last ones wait for their end.

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
        text = self._open.get(rank, "") + text.replace("\r\n", "\n")
        begun = _BEGUN_CODE.search(text)
        code = begun[0] if begun else ""
        text = text.removesuffix(code)
        lines, still = self._on_screen(text) if goes_up(text) else self._cut(text)
        self._open[rank] = still + code
        # -0 is 0: without a number the slice has all lines.
        return [self._as_drawn(line) for line in lines[-self._num_last :]]

    def _cut(self, text: str) -> tuple[list[str], str]:
        """The complete lines, and what is open."""
        *lines, rest = text.split("\n")
        held = ""
        # Below a bar another one may be drawn, and then the cursor goes up: it comes in pieces.
        if lines and "\r" in lines[-1] and rest[:1] in ("", "\r") and rest.count("\r") < 2:
            held = f"\r{self._as_drawn(lines.pop())}\n"
        _, redrawn, last = rest.rstrip("\r").rpartition("\r")
        # A last "\r" is kept: what comes next is drawn over the line, or is a "\n".
        end = "\r" if rest.endswith("\r") else ""
        return lines, held + redrawn + ansi.without_moves(last)[: self._max_chars] + end

    def _on_screen(self, text: str) -> tuple[list[str], str]:
        """The same of bars below each other, between which the cursor goes up and down."""
        lines, cursor, rewrites, top, num_down = on_screen(text)
        # A line further down belongs to no bar, and one alone may be that of a bar that is erased.
        is_below = num_down > 1 and not any(lines[cursor:])
        num_complete = cursor if is_below else max(top, len(lines) - _SCREEN_LINES)
        still = [self._as_drawn(line) for line in lines[num_complete:]]
        moves = "\r" if rewrites else ""
        if len(still) > 1:
            moves = f"\x1b[{len(still) - 1}A" + "\n" * (cursor - num_complete)
        return lines[:num_complete], "\n".join(still) + moves

    def partial(self) -> list[tuple[int, str]]:
        """The unfinished lines as they look now."""
        return [(rank, line) for rank in sorted(self._open) for line in self._unfinished(rank)]

    def rest(self, rank: int) -> list[str]:
        """The unfinished lines of a rank, for good."""
        lines = self._unfinished(rank)
        self.clear(rank)
        return lines

    def clear(self, rank: int) -> None:
        """Forget the unfinished lines of a rank."""
        self._open.pop(rank, None)

    def _unfinished(self, rank: int) -> list[str]:
        lines = as_shown(_BEGUN_CODE.sub("", self._open.get(rank, ""))).split("\n")
        return [self._as_drawn(line) for line in lines if line]

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
        self._num_shown = Counter[int]()

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
            # Of lines that came at one time the first of each rank, then the second, ...
            first = min(heads, key=lambda rank: (heads[rank][0], self._num_shown[rank], rank))
            since, line = heads[first]
            same = tuple(rank for rank, head in heads.items() if head[1] == line)
            all_there = len(same) == len(self._waiting)
            if not (all_there or at_end or now - since >= FOLD_WITHIN_S):
                return shown
            shown.append((tuple(sorted(same)), line))
            self._num_shown.update(same)
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
    """Unfinished lines in the order of ranks; progress bars of one kind as their range.

    >>> fold_bars([(0, "epoch: 40%|##   | 2/5"), (1, "epoch: 60%|###  | 3/5"), (2, "other")])
    ['[0, 1] epoch 40-60 %', '[2] other']
    """
    groups: dict[str, list[tuple[int, str]]] = {}
    for rank, line in lines:
        text = ansi.plain(line)
        bar = _BAR.search(text)
        # Other lines are one only if they are equal: what they say of a rank must be true of it.
        kind = f"bar {bool(bar['percent'])} {_NUMBER.sub('0', bar['name'])}" if bar else text
        groups.setdefault(kind, []).append((rank, line))
    return [_folded(members) for members in groups.values()]


def _folded(members: list[tuple[int, str]]) -> str:
    """Bars of one kind as one line."""
    ranks = format_ranks(rank for rank, _ in members)
    if len({line for _, line in members}) == 1:
        return f"[{ranks}] {members[0][1]}"
    bars = [bar for _, line in members if (bar := _BAR.search(ansi.plain(line)))]
    done = sorted({int(bar["percent"] or bar["count"]) for bar in bars})
    names = {bar["name"].strip().removesuffix(":") for bar in bars}
    name = names.pop() if len(names) == 1 else ""
    reached = str(done[0]) if len(done) == 1 else f"{done[0]}-{done[-1]}"
    unit = "%" if bars[0]["percent"] else "it"
    return " ".join(filter(None, (f"[{ranks}]", name, reached, unit)))
