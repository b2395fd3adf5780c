"""One line of text that says how far something is. Runs anywhere; no torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_AFTER_S = 1.0  # what is over sooner needs no line
_EVERY_S = 0.2


class ProgressLine:
    """Draws "checked 1,200 of 5,000 images" over itself, once it has lasted for a second.

    Call it with how many are done of how many. On what is no terminal nor a notebook it writes a
    line every ten seconds instead, as a log should not fill up.
    """

    def __init__(
        self,
        text: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._text = text
        self._stream = stream or sys.stderr
        self._clock = clock
        # the stream of a notebook is no terminal, but what it shows is drawn over as well
        in_notebook = type(self._stream).__module__ == "ipykernel.iostream"
        self._draws_over = in_notebook or self._stream.isatty()
        self._every_s = _EVERY_S if self._draws_over else 10.0
        self._next_at = clock() + (_AFTER_S if self._draws_over else self._every_s)
        self._drawn = 0

    def __call__(self, done: int, total: int | None = None) -> None:
        """Draw the line, if it is time or the end of one that was drawn; None: no end is known."""
        now, is_over = self._clock(), total is not None and done >= total
        if now < self._next_at and not (is_over and self._drawn):
            return
        self._next_at = now + self._every_s
        line = self._text.format(done=f"{done:,}", total=f"{total or 0:,}")
        if self._draws_over:
            self._stream.write("\r" + line.ljust(self._drawn) + ("\n" if is_over else ""))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
        self._drawn = len(line)
