"""What a stream of text can show: lines that are drawn over, and colours. Runs anywhere."""

from __future__ import annotations

import os
import re
import shutil
from typing import Any, TextIO

CODES = re.compile(
    r"\x1b\[([0-9;]*)m|\x1b\[[0-9;?]*[A-Za-ln-z]"
    r"|\x1b\][^\x07\x1b]{0,2000}(?:\x07|\x1b\\)"  # a longer title or link counts as text
)
"""The codes that a terminal does not show: the first group has the numbers of a colour's."""

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def without_controls(text: str) -> str:
    """A name as it may be shown: what moves the cursor or turns the text's direction is escaped.

    >>> print(without_controls("cat\\x1b[2J \\u202egpj.exe"), without_controls("日本 .jpg"))
    cat\\x1b[2J \\u202egpj.exe 日本 .jpg
    """
    return _CONTROLS.sub(lambda found: plain(found.group()), text)


def plain(text: str) -> str:
    """A sentence that quotes what others have named: in one line, the unprintable as in `repr`.

    >>> plain("no field 'a\\nb'")
    "no field 'a\\\\nb'"
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def has_cursor(stream: TextIO | None) -> bool:
    """Whether a line of it can be drawn over: a terminal that knows how."""
    try:  # of what users put in the place of a stream, some know only `write`
        is_terminal = stream is not None and getattr(stream, "isatty", bool)()
    except ValueError:  # it was closed
        return False
    return is_terminal and os.environ.get("TERM", "dumb") != "dumb"


def shows_colours(stream: TextIO) -> bool:
    """Whether codes for colours are welcome: on a terminal that knows them, and in a notebook."""
    if any(base.__module__ == "ipykernel.iostream" for base in type(stream).__mro__):
        return True
    return has_cursor(stream) and not os.environ.get("NO_COLOR")  # https://no-color.org


class DrawnLine:
    """A line of a terminal that any thread draws over itself; `write_line` writes above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None  # while it is seen

    def draw(self, text: str) -> None:
        """Show this, as far as it fits (what wraps cannot be drawn over); "" wipes the line."""
        if text and self._bar is None:
            from tqdm import tqdm  # not sooner: it takes 70 ms

            _drawn.add(self)
            self._bar = tqdm(bar_format="{desc}", file=self._stream, leave=False)
        if text:
            self._bar.set_description_str(text[: width()])
        elif self._bar is not None:
            bar, self._bar = self._bar, None
            _drawn.discard(self)
            bar.close()


_drawn: set[DrawnLine] = set()


def write_line(text: str, stream: TextIO) -> None:
    """Write a line: what is drawn makes room for it."""
    if _drawn:  # else each line of a flood would wait for tqdm's locks
        from tqdm import tqdm

        tqdm.write(text, file=stream)
    else:
        print(text, file=stream)
    stream.flush()


def width() -> int:
    """How many characters a line may have that can be drawn over."""
    return max(1, shutil.get_terminal_size().columns - 1)
