"""Which picture a training or a loop gets here: widget or text. Runs on the client."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, Protocol

from gpupool.core.errors import OptionsError
from gpupool.notebook.monitor.loop_history import LoopHistory
from gpupool.notebook.monitor.picture import History, history_html, history_text
from gpupool.notebook.monitor.text import HINT, TextProgress
from gpupool.notebook.monitor.words import lost
from gpupool.notebook.page.cell_output import Place
from gpupool.notebook.page.front_end import has_prompt, has_reader, in_notebook
from gpupool.training.history import TrainingHistory

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
            "progress='plot' needs a notebook, and this is none: choose 'auto' or 'table'."
        )
    if how == "table" or not in_notebook():
        # what a notebook gets on stderr looks like an error
        stream = sys.stdout if in_notebook() else sys.stderr
        if stream is None:  # as Python has it where it was closed before
            return
        draws = waits or not has_prompt()
        view = TextProgress(stream, draws=draws, hint=HINT if waits else "")
    else:
        view = WidgetView(run.stop, run.history)
        if not has_reader():
            view = _both(view, TextProgress(sys.stdout, draws=False))
    view(run.history)  # before the thread of the run may call it too
    run.add_listener(view)


def show_again(run: Run) -> None:
    """Show `run` in the running cell too: live while it trains, else the picture of its end."""
    if run.history.is_over:
        Place().show(still_picture(run.history))
        return
    view = WidgetView(run.stop, run.history)
    run.add_listener(view)
    view(run.history)  # it may have ended before it could call the listener


def _both(view: Listener, log: Listener) -> Listener:
    def show(history: TrainingHistory) -> None:
        view(history)
        log(history)

    return show


class WidgetView:
    """The live monitor, replaced by a still picture at the end.

    Widgets do not survive in a saved notebook ("model not found"); plain HTML does.

    Args:
        on_stop: called when Stop is pressed; see `TrainingMonitor`.
        place: the output that it takes; of the running cell unless given.
    """

    def __init__(
        self,
        on_stop: Callable[[], None],
        history: History | None = None,
        place: Place | None = None,
    ) -> None:
        # Not before: it brings ipywidgets along.
        from gpupool.notebook.monitor.widget import TrainingMonitor

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
