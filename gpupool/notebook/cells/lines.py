"""The ranks' text as lines while it comes: cut, and equal ones of several ranks together."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable

from gpupool.core.formatting import format_ranks
from gpupool.notebook.page import ansi
from gpupool.pool.calls.terminal_text import as_shown, goes_up, line_as_shown, on_screen

FOLD_WITHIN_S = 0.5  # a line that several ranks say within that time is shown once
MAX_WAITING = 200_000  # lines of a rank that nobody has waited for yet
_SCREEN_LINES = 64  # the cursor goes up and down between so many
_BEGUN_CODE = re.compile(r"\x1b(?:\[[0-9;]{0,20})?\Z")  # the rest of it comes with the next piece
_NUMBER = re.compile(r"\d+")
# tqdm's: "epoch:  40%|##   | 2/5 [00:01<00:02,  1.6it/s]", or "12it [00:01, 9.8it/s]"
_BAR = re.compile(r"(\d{1,9})(%(?=\|)|it(?= \[))")


class Lines:
    """The ranks' streams as lines in the order in which they come, equal ones once.

    A rank's line waits a moment for the same line of the others; the order of the lines of each
    rank stays. Unfinished ones wait for their end. `now` is in seconds. Of a line `max_chars` are
    kept, of each rank the last `num_last` lines.
    """

    def __init__(
        self, ranks: Iterable[int], max_chars: int | None = None, num_last: int = MAX_WAITING
    ) -> None:
        self._max_chars, self._num_last = max_chars, num_last
        self._waiting = {rank: deque[tuple[float, str]](maxlen=num_last) for rank in ranks}
        self._open: dict[int, str] = {}
        self._num_shown = Counter[int]()

    def feed(self, rank: int, text: str, now: float) -> None:
        """Add a piece of a stream; of a redrawn progress bar the last state counts."""
        text = self._open.get(rank, "") + text.replace("\r\n", "\n")
        begun = _BEGUN_CODE.search(text)
        code = begun[0] if begun else ""
        text = text.removesuffix(code)
        lines, still = self._on_screen(text) if goes_up(text) else self._cut(text)
        self._open[rank] = still + code
        self._add(rank, map(self._as_drawn, lines[-self._num_last :]), now)

    def end(self, rank: int, now: float, text: str | None = None) -> None:
        """End what is unfinished; add a text of which nothing is."""
        self._add(rank, self._unfinished(rank), now)
        self._open.pop(rank, None)
        if text is not None:
            self._add(rank, (line[: self._max_chars] for line in text.split("\n")), now)

    def due(self, now: float, *, at_end: bool = False) -> list[tuple[tuple[int, ...], str]]:
        """Take the lines that need not wait longer, with their ranks; `at_end` all."""
        shown: list[tuple[tuple[int, ...], str]] = []
        while heads := {rank: lines[0] for rank, lines in self._waiting.items() if lines}:
            # Only the first line of each rank is looked at, so the order within a rank stays.
            # Of lines that came at one time the first of each rank, then the second, ...
            first = min(heads, key=lambda rank: (heads[rank][0], self._num_shown[rank], rank))
            since, line = heads[first]
            same = tuple(rank for rank, head in heads.items() if head[1] == line)
            all_there = len(same) == len(self._waiting)
            if not (all_there or at_end or now - since >= FOLD_WITHIN_S):
                break
            shown.append((tuple(sorted(same)), line))
            self._num_shown.update(same)
            for rank in same:
                self._waiting[rank].popleft()
        return shown

    def tail(self, count: int) -> list[tuple[tuple[int, ...], str]]:
        """The last lines, which stay."""
        shown = Lines(())
        shown._waiting = {rank: lines.copy() for rank, lines in self._waiting.items()}
        return shown.due(0.0, at_end=True)[-count:]

    def bars(self) -> list[str]:
        return fold_bars((rank, line) for rank in self._waiting for line in self._unfinished(rank))

    def _add(self, rank: int, lines: Iterable[str], now: float) -> None:
        self._waiting[rank].extend((now, line) for line in lines)

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

    def _unfinished(self, rank: int) -> list[str]:
        lines = as_shown(_BEGUN_CODE.sub("", self._open.get(rank, ""))).split("\n")
        return [self._as_drawn(line) for line in lines if line]

    def _as_drawn(self, line: str) -> str:
        # Cut last: what a carriage return has drawn over does not count.
        return ansi.without_moves(line_as_shown(line))[: self._max_chars]


def fold_bars(lines: Iterable[tuple[int, str]]) -> list[str]:
    """Unfinished lines in the order of ranks; progress bars of one kind as their range.

    >>> fold_bars([(0, "epoch: 40%|##   | 2/5"), (1, "epoch: 60%|###  | 3/5"), (2, "other")])
    ['[0, 1] epoch 40-60 %', '[2] other']
    """
    groups: dict[tuple[str, str], list[tuple[int, str, str, int]]] = {}
    for rank, line in lines:
        text = ansi.plain(line)
        bar = _BAR.search(text)
        name, done = (text[: bar.start()], int(bar[1])) if bar else (text, 0)
        # Other lines are one only if they are equal: what they say of a rank must be true of it.
        kind = (_NUMBER.sub("0", name), bar[2]) if bar else (line, "")
        groups.setdefault(kind, []).append((rank, line, name, done))
    return [_folded(bars, unit) for (_, unit), bars in groups.items()]


def _folded(bars: list[tuple[int, str, str, int]], unit: str) -> str:
    ranks, lines, names, done = (list(column) for column in zip(*bars, strict=True))
    if len({*lines}) == 1:
        return f"[{format_ranks(ranks)}] {lines[0]}"
    name = names[0].strip().removesuffix(":") if len({*names}) == 1 else ""
    reached = f"{min(done)}-{max(done)}" if len({*done}) > 1 else f"{done[0]}"
    return " ".join(filter(None, (f"[{format_ranks(ranks)}]", name, reached, unit)))
