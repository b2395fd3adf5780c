"""What a stream of text can show: lines that are drawn over, and colours. Runs anywhere."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any, TextIO

MAX_CODE_CHARS = 2000  # of a title or a link; a longer one counts as text
CODES = re.compile(
    r"\x1b\[([0-9;]*)m|\x1b\[[0-9;?]*[A-Za-ln-z]"
    rf"|\x1b\][^\x07\x1b]{{0,{MAX_CODE_CHARS}}}(?:\x07|\x1b\\)"
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
    return _is_terminal(stream) and os.environ.get("TERM", "dumb") != "dumb"


def shows_colours(stream: TextIO) -> bool:
    """Whether codes for colours are welcome: on a terminal that knows them, and in a notebook.

    NO_COLOR (https://no-color.org) and TERM=dumb forbid them on a terminal.
    """
    if any(base.__module__ == "ipykernel.iostream" for base in type(stream).__mro__):
        return True
    return has_cursor(stream) and not os.environ.get("NO_COLOR")


class DrawnLine:
    """A line of a terminal that is drawn over itself, as tqdm does it.

    Whole lines, by `cleared`, come above it. Any thread may call its methods. They raise what
    writing to the stream raises.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None  # while it is seen

    def draw(self, text: str) -> None:
        """Show this, as far as it fits: a line that wraps could not be drawn over."""
        from tqdm import tqdm  # `%load_ext gpupool` does not wait for it

        text = text[: width()]
        if self._bar is None:
            _drawn.add(self)
            self._bar = tqdm(desc=text, bar_format="{desc}", file=self._stream, leave=False)
        else:
            self._bar.set_description_str(text)

    def close(self) -> None:
        """Wipe it."""
        if self._bar is not None:
            bar, self._bar = self._bar, None
            _drawn.discard(self)
            bar.close()


_drawn: set[DrawnLine] = set()


@contextlib.contextmanager
def cleared(stream: TextIO) -> Iterator[TextIO]:
    """`stream`, for whole lines: what is drawn makes room for them."""
    if not _drawn:  # each line of a flood would wait for tqdm's locks
        yield stream
        return
    from tqdm import tqdm

    with tqdm.external_write_mode(file=stream):
        yield stream


def width() -> int:
    """How many characters a line may have that can be drawn over."""
    return max(1, shutil.get_terminal_size().columns - 1)


def _is_terminal(stream: TextIO | None) -> bool:
    """Of what users put in the place of a stream, some know only `write`."""
    try:
        return stream is not None and getattr(stream, "isatty", bool)()
    except ValueError:  # it was closed
        return False
