"""Training progress in a terminal or a log file. Runs on the client, also without IPython."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TextIO

from gpupool.pool.notices import NoticeLines
from gpupool.training.history import TrainingHistory

REDRAW_EVERY_S = 0.1


class TextProgress:
    """Writes one line that is drawn anew on a terminal, else a line per epoch and validation.

    Call it with the history as often as there is news.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._drawn_at = -REDRAW_EVERY_S
        self._drawn = ""
        self._milestone = (0, 0)
        self._notice = ""
        self._write_notice = NoticeLines(stream=stream)
        self._over = False

    def __call__(self, history: TrainingHistory) -> None:
        """Write what is new."""
        if self._over:  # the end may be reported twice: by its event, and when the run is over
            return
        self._over = history.is_over
        if history.notice != self._notice:
            self._notice = history.notice
            self._tell(history.notice)
        if self._stream.isatty():
            self._redraw(history)
        else:
            self._log(history)

    def _redraw(self, history: TrainingHistory) -> None:
        now = self._clock()
        if not self._over and now - self._drawn_at < REDRAW_EVERY_S:
            return
        self._drawn_at = now
        # A line that wraps cannot be drawn over: cut it, but not the last one, which stays.
        width = shutil.get_terminal_size().columns - 1
        line = history.line() if self._over else history.line()[:width]
        end = "\n" if self._over else ""
        self._write("\r" + line.ljust(len(self._drawn)) + end)
        self._drawn = line

    def _tell(self, notice: str) -> None:
        """A notice on lines of its own, above the one that is drawn anew."""
        if self._drawn:
            self._write("\r" + " " * len(self._drawn) + "\r")
            self._drawn = ""
        self._write_notice(notice or None)

    def _log(self, history: TrainingHistory) -> None:
        per_epoch = history.start.steps_per_epoch if history.start else 0
        epochs = len(history.steps) // per_epoch if per_epoch else 0
        milestone = (epochs, len(history.validations))
        if milestone != self._milestone or self._over:
            self._milestone = milestone
            self._write(history.line() + "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
