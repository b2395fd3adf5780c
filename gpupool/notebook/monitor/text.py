"""Training progress in a terminal or a log file. Runs on the client, also without IPython."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from gpupool.core.terminal import DrawnLine, cleared, has_cursor, width
from gpupool.notebook.monitor import words
from gpupool.pool.notices import NoticeLines
from gpupool.training.history import TrainingHistory

REDRAW_EVERY_S = 0.1
HINT = "   (Ctrl-C: stop and keep)"
# A log gets a line whenever there is a validation or an epoch is over. Between these:
LINE_EVERY_S = 10.0
LINE_EVERY_PERCENT = 5  # of all steps, if that comes sooner
MIN_LINE_S = 1.0
LINES_PER_RUN = 50  # where it lasts so long that a line every 10 s would fill the log


class TextProgress:
    """Writes one line that is drawn over on a terminal, else a line now and then.

    Call it with the history as often as there is news.

    Args:
        draws: False has it write lines on a terminal, too.
        hint: what the drawn line says at its end, if there is room.
    """

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        *,
        draws: bool = True,
        hint: str = HINT,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._draws, self._hint = draws and has_cursor(stream), hint
        self._began_at = self._written_at = clock()
        self._drawn_at = -REDRAW_EVERY_S
        self._line = DrawnLine(stream)
        self._milestone = (0, 0)
        self._percent = 0
        self._notice = ""
        self._write_notice = NoticeLines(stream=stream)
        self._over = False

    def __call__(self, history: TrainingHistory) -> None:
        """Write what is new."""
        if self._over:  # the end may be reported twice: by its event, and when the run is over
            return
        self._over = history.is_over
        notice = words.notice(history)
        if notice != self._notice:
            known = self._notice.splitlines()
            self._notice = notice
            # A notice has several lines, and a terminal has shown the earlier ones already.
            news = "\n".join(line for line in notice.splitlines() if line not in known)
            self._write_notice(news or None)
        if self._draws:
            self._redraw(history)
        else:
            self._log(history)

    def _redraw(self, history: TrainingHistory) -> None:
        now = self._clock()
        if not self._over and now - self._drawn_at < REDRAW_EVERY_S:
            return
        self._drawn_at = now
        if self._over:  # it stays, and may be as long as it likes
            self._line.close()
            self._write(history.line())
        else:
            hint = self._hint if history.steps and history.status == "training" else ""
            line = history.line()[: width()]
            self._line.draw(line + hint if len(line + hint) <= width() else line)

    def _log(self, history: TrainingHistory) -> None:
        per_epoch = history.start.steps_per_epoch if history.start else 0
        epochs = len(history.steps) // per_epoch if per_epoch else 0
        if history.start and history.start.validate_every:
            epochs = 0  # the validation in a moment has more to say
        milestone = (epochs, len(history.validations))
        if milestone != self._milestone or self._over or self._is_due(history):
            self._milestone = milestone
            self._written_at, self._percent = self._clock(), _percent(history)
            self._write(history.line())

    def _is_due(self, history: TrainingHistory) -> bool:
        """Whether a line is due that says only that training continues."""
        now = self._clock()
        since = now - self._written_at
        if not history.steps or since < MIN_LINE_S:
            return False
        is_farther = _percent(history) // LINE_EVERY_PERCENT > self._percent // LINE_EVERY_PERCENT
        return is_farther or since >= max(LINE_EVERY_S, (now - self._began_at) / LINES_PER_RUN)

    def _write(self, line: str) -> None:
        with cleared(self._stream) as stream:
            print(line, file=stream, flush=True)


def _percent(history: TrainingHistory) -> int:
    return int(100 * history.progress + 1e-6)
