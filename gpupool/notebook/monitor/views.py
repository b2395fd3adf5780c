"""Which picture a training or a loop gets here: widget, HTML or text. Runs on the client."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from gpupool.core.errors import OptionsError
from gpupool.notebook.monitor.loop_history import LoopHistory
from gpupool.notebook.monitor.picture import History, history_html, history_text, notice_of
from gpupool.notebook.monitor.text import HINT, TextProgress
from gpupool.notebook.monitor.words import lost
from gpupool.notebook.page.cell_output import Place
from gpupool.notebook.page.front_end import has_prompt, has_reader, has_widgets, in_notebook
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
        waits: whether the cell waits for its end; if not, the user continues at the prompt.

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
        view = live_view(run.history, run.stop)
        if not has_reader():
            view = _both(view, TextProgress(sys.stdout, draws=False))
    view(run.history)  # before the thread of the run may call it too
    run.add_listener(view)


def show_again(run: Run) -> None:
    """Show `run` in the running cell too: live while it trains, else the picture of its end."""
    if run.history.is_over:
        Place().show(still_picture(run.history))
        return
    view = live_view(run.history, run.stop)
    run.add_listener(view)
    view(run.history)  # it may have ended before it could call the listener


def _both(view: Listener, log: Listener) -> Listener:
    def show(history: TrainingHistory) -> None:
        view(history)
        log(history)

    return show


def live_view(
    history: History,
    on_stop: Callable[[], None],
    place: Place | None = None,
    every_s: float = HTML_EVERY_S,
) -> Callable[[History], None]:
    """What shows `history` from now on; HTML without widgets, or where the kernel has no comms.

    Args:
        on_stop: called when Stop is pressed; see `TrainingMonitor`.
        place: the output that it takes; of the running cell unless given.
        every_s: HTML is drawn again after so many seconds.
    """
    place = Place() if place is None else place
    if has_widgets():
        try:
            return WidgetView(on_stop, history, place)
        # `has_widgets` finds anywidget without importing it; that may still fail.
        except ImportError:
            pass
    return HtmlView(history, place, every_s)


class WidgetView:
    """The live monitor, replaced by a still picture at the end.

    Widgets do not survive in a saved notebook ("model not found"); plain HTML does.
    """

    def __init__(
        self,
        on_stop: Callable[[], None],
        history: History | None = None,
        place: Place | None = None,
    ) -> None:
        from gpupool.notebook.monitor.widget import TrainingMonitor  # ipywidgets may be missing

        self.monitor = TrainingMonitor(on_stop, history=history, lost_picture=lost_picture)
        self._place = Place() if place is None else place
        self._place.show(*self.monitor._repr_mimebundle_())
        self._is_still = False

    def __call__(self, history: History) -> None:
        """Pass the news on; at the end put the still picture in the place of the widget.

        The widget stays open, for pages that were reloaded meanwhile: they learn the end from it.
        A loop may report even after the end of its cell: then the picture is drawn again.
        """
        self.monitor.update(history)
        if history.is_over or self._is_still:
            self._is_still = True
            picture = still_picture(history)
            self._place.show(picture)
            self.monitor.leave(picture)


class HtmlView:
    """The still picture, drawn again every `every_s` seconds: for kernels without widgets."""

    def __init__(
        self,
        history: History,
        place: Place,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._place, self._every_s = clock, place, every_s
        self._drawn_at = clock()
        self._notice = ""
        place.show(still_picture(history))

    def __call__(self, history: History) -> None:
        """Draw the picture again, if it is time."""
        now, notice = self._clock(), notice_of(history)
        is_news = history.is_over or notice != self._notice
        if not is_news and now - self._drawn_at < self._every_s:
            return
        self._drawn_at, self._notice = now, notice
        self._place.show(still_picture(history))


def lost_picture(history: History) -> dict[str, Any]:
    """The picture that stays where the kernel dies now."""
    if isinstance(history, LoopHistory):
        return still_picture(history.lost())
    ended = copy.copy(history)  # shallow: only how it ended differs
    ended.status, ended.error, ended.notice = "failed", lost(history), ""
    return still_picture(ended)


def still_picture(history: History) -> dict[str, Any]:
    """The picture as the display data that a notebook keeps."""
    return {"text/html": history_html(history), "text/plain": history_text(history)}
