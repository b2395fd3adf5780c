"""Text as a terminal leaves it: a progress bar that was drawn a thousand times is there once."""

from __future__ import annotations

import re

# cursor up N lines, erase in line: what nested progress bars use; colours stay in the text
_MOVES = re.compile(r"(\n|\r|\x1b\[[0-9]*A|\x1b\[[0-9]*K)")
_UP = re.compile(r"\x1b\[[0-9]*A")


def as_shown(text: str) -> str:
    r"""The text with carriage returns and moves of the cursor applied.

    >>> as_shown("1 of 2\r2 of 2\ndone\n")
    '2 of 2\ndone\n'
    >>> as_shown("outer 1\n\rinner 1\x1b[A\router 2\n\rinner 2\x1b[A\n\n")
    'outer 2\ninner 2\n'
    >>> as_shown("outer 1\n\rinner 1\x1b[A\n\r       \x1b[A\router 1\nend")
    'outer 1\nend'
    """
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    if _UP.search(text):
        return _on_screen(text)
    if "\r" not in text:
        return text
    return "\n".join(line_as_shown(line) for line in text.split("\n"))


def line_as_shown(line: str) -> str:
    """The last state of a line that was drawn over, without the spaces that have erased it."""
    _, redrawn, last = line.rstrip("\r").rpartition("\r")
    return last.rstrip(" ") if redrawn else last


def _on_screen(text: str) -> str:
    lines, row, rewrites = [list[str]()], 0, False  # of each line its parts: joined once
    for n, part in enumerate(_MOVES.split(text)):
        is_move = n % 2 == 1
        if is_move and part == "\n":
            row += 1
            rewrites = row < len(lines)
            if not rewrites:
                lines.append([])
        elif is_move and part == "\r":
            rewrites = True
        elif is_move and part.endswith("A"):
            row = max(0, row - int(part[2:-1][:9] or 1))
        elif part and not is_move:
            if rewrites:
                lines[row].clear()
            lines[row].append(part)
            rewrites = False
    return "\n".join("".join(line).rstrip(" ") for line in lines)
