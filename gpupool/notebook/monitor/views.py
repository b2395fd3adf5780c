"""Which picture a training gets here: live HTML or text. Runs on the client."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpupool.core.errors import OptionsError
from gpupool.notebook.monitor.board import training_text
from gpupool.notebook.monitor.picture import history_html
from gpupool.notebook.monitor.text import HINT, TextProgress
from gpupool.notebook.page.cell_output import Place
from gpupool.notebook.page.front_end import has_prompt, has_reader, in_notebook
from gpupool.training.history import TrainingHistory

if TYPE_CHECKING:
    from gpupool.training.run import TrainingRun

Listener = Callable[[TrainingHistory], None]


def show_training(run: TrainingRun, how: str = "auto", *, waits: bool = True) -> None:
    """Show the course of `run` where the user is: the one place that chooses how.

    Args:
        how: `TrainingOptions.progress`.
        waits: whether the cell waits for its end; if not, the user continues at the prompt.

    Raises:
        OptionsError: "plot", where there are none.
    """
    if how == "none":
        return
    if how == "plot" and not in_notebook():
        raise OptionsError(
            "progress='plot' needs a notebook, and this is none: choose 'auto' or 'table'."
        )
    views: list[Listener] = []
    is_drawn = how != "table" and in_notebook()
    # what a notebook gets on stderr looks like an error
    stream = sys.stdout if in_notebook() else sys.stderr
    # (None: it was closed before Python started)
    if stream is not None and not (is_drawn and has_reader()):
        draws = not is_drawn and (waits or not has_prompt())
        views.append(TextProgress(stream, draws=draws, hint=HINT if waits else ""))
    if is_drawn:
        views.append(_live(run))
    for view in views:
        view(run.history)  # before the thread of the run may call it too
        run.add_listener(view)


def show_again(run: TrainingRun) -> None:
    """Show `run` in the running cell too: live while it trains, else the picture of its end."""
    history = run.history
    if history.is_over:
        html, text = history_html(history), training_text(history)
        Place().show({"text/html": html, "text/plain": text})
        return
    view = _live(run)
    run.add_listener(view)
    view(history)  # it may have ended before it could call the listener


def _live(run: TrainingRun) -> Listener:
    # Not before: it brings ipywidgets along.
    from gpupool.notebook.monitor.live import LiveMonitor

    return LiveMonitor(run.stop, run.history)
