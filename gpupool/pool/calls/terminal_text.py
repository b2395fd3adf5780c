"""Text as a terminal leaves it: a progress bar that was drawn a thousand times is there once."""

from __future__ import annotations

import re
from typing import NamedTuple

from gpupool.core.terminal import CODES

# what bars are drawn with: cursor up N lines, erase in line
_MOVES = re.compile(r"(\n|\r|\x1b\[[0-9]*[AK])")
_UP = re.compile(r"\x1b\[[0-9]*A")


def as_shown(text: str) -> str:
    r"""The text with carriage returns and moves of the cursor applied; its colours stay.

    >>> as_shown("1 of 2\r2 of 2\ndone\n")
    '2 of 2\ndone\n'
    >>> as_shown("outer 1\n\rinner 1\x1b[A\router 2\n\rinner 2\x1b[A\n\n")
    'outer 2\ninner 2\n'
    >>> as_shown("waits\nalso\r\x1b[2K\x1b[1A\x1b[2Kends\n")  # as rich draws
    'ends\n'
    """
    text = text.replace("\r\n", "\n")
    if goes_up(text):
        text = "\n".join(on_screen(text).lines)
    elif "\r" in text:
        text = "\n".join(line_as_shown(line) for line in text.split("\n"))
    return CODES.sub(lambda code: code[0] if code[1] is not None else "", text)


def line_as_shown(line: str) -> str:
    """The last state of a line that was drawn over, without the spaces that have erased it."""
    _, redrawn, last = line.rstrip("\r").rpartition("\r")
    return last.rstrip(" ") if redrawn else last


def goes_up(text: str) -> bool:
    """Whether the cursor is moved to lines above, as bars below each other do."""
    return _UP.search(text) is not None


class Screen(NamedTuple):
    """What a terminal shows of a text: its lines, and where the cursor is."""

    lines: list[str]
    cursor: int  # the number of its line
    rewrites: bool  # what comes next is written over that line
    top: int  # the highest line that the cursor has gone up to
    num_down: int  # by so many lines it has gone down since


def on_screen(text: str) -> Screen:
    """The text with the cursor going up and down."""
    lines, row, rewrites = [list[str]()], 0, False  # of each line its parts: joined once
    top, num_down = len(text), 0
    for n, part in enumerate(_MOVES.split(text)):
        is_move = n % 2 == 1
        if is_move and part == "\n":
            row, num_down = row + 1, num_down + 1
            rewrites = row < len(lines)
            if not rewrites:
                lines.append([])
        elif is_move and part == "\r":
            rewrites = True
        elif is_move and part.endswith("A"):
            row = max(0, row - int(part[2:-1][:9] or 1))
            top, num_down = min(top, row), 0
        elif is_move and (rewrites or part == "\x1b[2K"):
            lines[row].clear()
        elif part and not is_move:
            if rewrites:
                lines[row].clear()
            lines[row].append(part)
            rewrites = False
    shown = ["".join(line).rstrip(" ") for line in lines]
    return Screen(shown, row, rewrites, top, num_down)
