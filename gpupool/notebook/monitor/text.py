"""Training progress in a terminal or a log file. Runs on the client, also without IPython."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from gpupool.core.terminal import DrawnLine, has_cursor, write_line
from gpupool.notebook.monitor import words
from gpupool.pool.notices import NoticeLines
from gpupool.training.history import TrainingHistory

REDRAW_EVERY_S = 0.1
LINE_EVERY_S = 10.0
HINT = "(Ctrl-C: stop and keep)"


class TextProgress:
    """Draws a line over itself on a terminal; in a log writes one for each validation or epoch, or
    every 10 s. At the end it leaves a line.

    Call it with the history as often as there is news.

    Args:
        draws: False has it write lines on a terminal, too.
        hint: what the drawn line says at its end, as far as there is room.
    """

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        *,
        draws: bool = True,
        hint: str = HINT,
    ) -> None:
        self._stream, self._clock, self._hint = stream, clock, hint
        self._drawn = DrawnLine(stream) if draws and has_cursor(stream) else None
        self._write_notice = NoticeLines(stream=stream)
        self._shown_at = clock()
        self._news = (0, 0)
        self._over = False

    def __call__(self, history: TrainingHistory) -> None:
        """Write what is new."""
        if self._over:  # the end may be reported twice: by its event, and when the run is over
            return
        self._over = history.is_over
        for line in words.notice(history).splitlines():
            self._write_notice(line)
        now, start = self._clock(), history.start
        if self._drawn and not self._over:
            if now - self._shown_at >= REDRAW_EVERY_S:
                self._shown_at = now
                self._drawn.draw(f"{history.line()}   {self._hint if history.steps else ''}")
            return
        if self._drawn:
            self._drawn.draw("")
        # Where epochs end with a validation, that has more to say.
        per_epoch = start.steps_per_epoch if start and not start.validate_every else 0
        epochs = len(history.steps) // per_epoch if per_epoch else 0
        news, is_late = (epochs, len(history.validations)), now - self._shown_at >= LINE_EVERY_S
        if self._over or news != self._news or (is_late and history.steps):
            self._shown_at, self._news = now, news
            write_line(history.line(), self._stream)
