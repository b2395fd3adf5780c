"""Which picture a training gets here: widget, HTML or text. Runs on the client."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from IPython.display import display

from gpupool.core.errors import OptionsError
from gpupool.notebook.monitor import words
from gpupool.notebook.monitor.picture import training_html, training_text
from gpupool.notebook.monitor.text import HINT, TextProgress
from gpupool.notebook.page.front_end import has_prompt, has_widgets, in_notebook
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


def show_training(run: Run, how: str = "auto", *, waits: bool = True) -> None:
    """Show the course of `run` where the user is: the one place that chooses how.

    Args:
        how: `TrainingOptions.progress`.
        waits: whether the cell waits for its end; if not, the user goes on at the prompt.

    Raises:
        OptionsError: "plot", where there are none.
    """
    view: Listener
    if how == "none":
        return
    if how == "plot" and not in_notebook():
        raise OptionsError(
            "progress='plot' needs a notebook, and this is none: choose 'auto' or 'table'.",
            "no notebook",
            "progress",
        )
    if how == "table" or not in_notebook():
        # what a notebook gets on stderr looks like an error
        stream = sys.stdout if in_notebook() else sys.stderr
        if stream is None:  # as Python has it where it was closed before
            return
        draws = waits or not has_prompt()
        view = TextProgress(stream, draws=draws, hint=HINT if waits else "")
    else:
        view = _live_view(run)
    view(run.history)  # before the thread of the run may call it too
    run.add_listener(view)


def _live_view(run: Run) -> Listener:
    """The widget; HTML where widgets are not installed, or the kernel has no comms for them."""
    if not has_widgets():
        return HtmlView()
    try:
        return WidgetView(run.stop)
    except ImportError:
        return HtmlView()


class WidgetView:
    """The live monitor, replaced by a still picture at the end.

    Widgets do not survive in a saved notebook ("model not found"); plain HTML does.
    """

    def __init__(self, on_stop: Callable[[], None]) -> None:
        from gpupool.notebook.monitor.widget import TrainingMonitor  # ipywidgets may be missing

        self.monitor = TrainingMonitor(on_stop)
        self._handle = display(self.monitor, display_id=True)

    def __call__(self, history: TrainingHistory) -> None:
        """Pass the news on; at the end put the still picture in the place of the widget.

        The widget stays open, for pages that were reloaded meanwhile: they learn the end from it.
        """
        self.monitor.update(history)
        if history.is_over:
            picture = still_picture(history)
            self._handle.update(picture, raw=True)
            self.monitor.leave(picture)


class HtmlView:
    """The still picture, drawn anew twice a second: for kernels without widgets."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._drawn_at = clock()
        first = still_picture(TrainingHistory())
        self._handle = display(first, display_id=True, raw=True)
        self._notice = ""

    def __call__(self, history: TrainingHistory) -> None:
        """Draw the picture again, if it is time."""
        now = self._clock()
        is_news = history.is_over or words.notice(history) != self._notice
        if not is_news and now - self._drawn_at < HTML_EVERY_S:
            return
        self._drawn_at, self._notice = now, words.notice(history)
        self._handle.update(still_picture(history), raw=True)


def still_picture(history: TrainingHistory) -> dict[str, Any]:
    """The picture as the display data that a notebook keeps."""
    return {"text/html": training_html(history), "text/plain": training_text(history)}
