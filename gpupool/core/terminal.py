"""What a stream of text can show: lines that are drawn over, and colours. Runs anywhere."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

MAX_CODE_CHARS = 2000  # of a title or a link; a longer one counts as text
CODES = re.compile(
    r"\x1b\[([0-9;]*)m|\x1b\[[0-9;?]*[A-Za-ln-z]"
    rf"|\x1b\][^\x07\x1b]{{0,{MAX_CODE_CHARS}}}(?:\x07|\x1b\\)"
)
"""The codes that a terminal does not show: the first group has the numbers of a colour's."""

FRESH_LINE = "\r\x1b[K"
"""What moves the cursor of a terminal to the start of its line."""
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
    """A line of a terminal that is drawn over itself; of several the newest is seen.

    What others write to stdout or stderr meanwhile pushes it aside: lines continue above it. Any
    thread may call its methods. They raise what writing to the stream raises.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream._stream if isinstance(stream, _Guarded) else stream
        self._shown = ""

    def draw(self, text: str) -> None:
        """Show this, as far as it fits: a line that wraps could not be drawn over."""
        with _lock:
            if self not in _lines:
                if _lines:
                    _lines[-1]._shown = ""  # it is covered
                _lines.append(self)
            text = text[: width()]
            if _lines[-1] is not self or text == self._shown:
                return
            _guard()
            if not _Guarded.is_unfinished:
                self._write(text)

    def close(self) -> None:
        """Wipe it; the one that it covered is seen when it is drawn next."""
        with _lock:
            if self in _lines:
                if self._shown:
                    self._write("")
                _lines.remove(self)
            if not _lines:
                _unguard()

    def _write(self, text: str) -> None:
        try:
            self._stream.write(FRESH_LINE + text)
            self._stream.flush()
        except (OSError, ValueError):  # it was closed
            _lines.remove(self)
            raise
        self._shown = text


_lines: list[DrawnLine] = []  # the newest is last
_lock = threading.RLock()


@contextlib.contextmanager
def cleared(stream: TextIO) -> Iterator[TextIO]:
    """`stream`, for whole lines: no drawn line is in their way; it comes again in a moment."""
    with _lock:
        _wipe()
        yield stream


def _wipe() -> None:
    if _lines and _lines[-1]._shown:
        with contextlib.suppress(OSError, ValueError):  # nobody sees it any more
            _lines[-1]._write("")


class _Guarded:
    """A stream of the terminal, for all who know it as stdout or stderr while a line is drawn."""

    is_unfinished = False  # somebody has written part of a line, which must not be drawn over

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write it where the drawn line was."""
        with _lock:
            if _lines and text:
                _wipe()
                _Guarded.is_unfinished = not text.endswith("\n")
            return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of them."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _guard() -> None:
    """Have what is written to stdout and stderr push the drawn line aside."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if has_cursor(stream) and not isinstance(stream, _Guarded):
            setattr(sys, name, _Guarded(stream))


def _unguard() -> None:
    """Nothing is drawn any more. Who has kept a guarded stream meanwhile may continue with it."""
    _Guarded.is_unfinished = False
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, _Guarded):
            setattr(sys, name, stream._stream)


def width() -> int:
    """How many characters a line may have that can be drawn over."""
    return max(1, shutil.get_terminal_size().columns - 1)


def _is_terminal(stream: TextIO | None) -> bool:
    """Of what users put in the place of a stream, some know only `write`."""
    try:
        return stream is not None and getattr(stream, "isatty", bool)()
    except ValueError:  # it was closed
        return False
