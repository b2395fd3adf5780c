"""Which picture a training gets here: live HTML or text. Runs on the client."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from gpupool.core.terminal import DrawnLine, has_cursor, write_line
from gpupool.notebook.monitor import words
from gpupool.notebook.page.front_end import has_reader, in_notebook
from gpupool.pool.notices import NoticeLines
from gpupool.training.history import TrainingHistory

if TYPE_CHECKING:
    from gpupool.training.run import TrainingRun

Listener = Callable[[TrainingHistory], None]

REDRAW_EVERY_S = 0.1
LINE_EVERY_S = 10.0


def show_training(run: TrainingRun, how: str = "auto", *, waits: bool = True) -> None:
    """Show the course of `run` where the user is: the one place that chooses how.

    `how` is `TrainingOptions.progress`. Unless the cell `waits`, the user goes on at the prompt.
    """
    if how == "none":
        return
    views: list[Listener] = []
    is_drawn = how != "table" and in_notebook()
    # what a notebook gets on stderr looks like an error
    stream = sys.stdout if in_notebook() else sys.stderr
    # (None: it was closed before Python started)
    if stream is not None and not (is_drawn and has_reader()):
        draws = waits and not is_drawn  # at a prompt no line may be drawn
        views.append(TextProgress(stream, draws=draws))
    if is_drawn:
        views.append(_live(run))
    for view in views:
        view(run.history)  # before the thread of the run may call it too
        run.add_listener(view)


def show_again(run: TrainingRun) -> None:
    """Show `run` in the running cell too: live while it trains, else the picture of its end."""
    view = _live(run)
    run.add_listener(view)
    view(run.history)  # it may have ended before it could call the listener


def _live(run: TrainingRun) -> Listener:
    # Not before: it brings ipywidgets along.
    from gpupool.notebook.monitor.live import LiveMonitor

    return LiveMonitor(run.stop, run.history)


class TextProgress:
    """Draws a line over itself on a terminal; in a log, or unless it `draws`, writes one for each
    validation or epoch, or every 10 s. At the end it leaves a line.
    """

    def __init__(self, stream: TextIO, *, draws: bool = True) -> None:
        self._stream = stream
        self._drawn = DrawnLine(stream) if draws and has_cursor(stream) else None
        self._write_notice = NoticeLines(stream=stream)
        self._shown_at = time.monotonic()
        self._news = (0, 0)
        self._over = False

    def __call__(self, history: TrainingHistory) -> None:
        if self._over:  # the end may be reported twice: by its event, and when the run is over
            return
        self._over = history.is_over
        for line in words.notice(history).splitlines():
            self._write_notice(line)
        now, start = time.monotonic(), history.start
        if self._drawn and not self._over:
            if now - self._shown_at >= REDRAW_EVERY_S:
                self._shown_at = now
                self._drawn.draw(f"{history.line()}   (Ctrl-C: stop and keep)")
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
