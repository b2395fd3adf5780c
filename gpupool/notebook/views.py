"""Which picture a training gets here: widget, HTML or text. Runs on the client."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from IPython.display import display

from gpupool.notebook.front_end import in_notebook
from gpupool.notebook.picture import training_html, training_text
from gpupool.notebook.text import TextProgress
from gpupool.training.history import TrainingHistory

HTML_EVERY_S = 0.5

Listener = Callable[[TrainingHistory], None]


class Run(Protocol):
    """What a view needs of a training run."""

    @property
    def history(self) -> TrainingHistory:
        """What has been reported so far."""

    def add_listener(self, listener: Listener) -> None:
        """Have `listener(history)` called, from a thread, on every news and once at the end."""

    def stop(self) -> None:
        """Ask for a graceful stop; sets a flag only."""


def show_training(run: Run) -> None:
    """Show the course of `run` where the user is: the one place that chooses how."""
    view: Listener
    if not in_notebook():
        view = TextProgress(sys.stderr)
    elif importlib.util.find_spec("anywidget") is None:
        view = HtmlView()
    else:
        view = WidgetView(run.stop)
    view(run.history)  # before the thread of the run may call it too
    run.add_listener(view)


class WidgetView:
    """The live monitor, replaced by a still picture at the end.

    Widgets do not survive in a saved notebook ("model not found"); plain HTML does.
    """

    def __init__(self, on_stop: Callable[[], None]) -> None:
        from gpupool.notebook.monitor import TrainingMonitor  # ipywidgets may be missing

        self.monitor = TrainingMonitor(on_stop)
        self._handle = display(self.monitor, display_id=True)
        self._over = False

    def __call__(self, history: TrainingHistory) -> None:
        """Pass the news on; at the end put the still picture in the place of the widget.

        The widget stays open: a page that was reloaded meanwhile does not know the display any
        more and goes on showing the widget, which then has the whole training as well.
        """
        if self._over:  # the end may be reported twice: by its event, and when the run is over
            return
        self.monitor.update(history)
        if history.is_over:
            self._over = True
            self._handle.update(still_picture(history), raw=True)


class HtmlView:
    """The still picture, drawn anew twice a second: for kernels without widgets."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._drawn_at = clock()
        first = still_picture(TrainingHistory())
        self._handle = display(first, display_id=True, raw=True)
        self._over = False
        self._notice = ""

    def __call__(self, history: TrainingHistory) -> None:
        """Draw the picture again, if it is time."""
        now = self._clock()
        is_news = history.is_over or history.notice != self._notice
        if self._over or (not is_news and now - self._drawn_at < HTML_EVERY_S):
            return
        self._over, self._drawn_at, self._notice = history.is_over, now, history.notice
        self._handle.update(still_picture(history), raw=True)


def still_picture(history: TrainingHistory) -> dict[str, Any]:
    """The picture as the display data that a notebook keeps."""
    return {"text/html": training_html(history), "text/plain": training_text(history)}
