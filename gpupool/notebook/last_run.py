"""The training before in this notebook, as pale curves behind the one that runs. Client."""

from __future__ import annotations

from typing import NamedTuple

from gpupool.notebook.monitor.curves import Curves, Mean
from gpupool.notebook.page.front_end import has_reader, in_notebook
from gpupool.training.history import TrainingHistory
from gpupool.training.run import TrainingRun

_MAX_POINTS = 100  # of a curve: they are in the saved notebook too


class _Run(NamedTuple):
    """What is kept of a training: few points, not its history, which may be long."""

    loss: str
    curves: dict[str, list[Mean]]


_last: _Run | None = None


def follow(run: TrainingRun, loss: str) -> None:
    """Put the curves of the training before behind those of `run`, which is the next one's.

    Losses are compared where both trainings minimize the one of this name.
    """
    if in_notebook() and has_reader() and _last is not None:
        is_same = _last.loss == loss
        curves = _last.curves.items()
        run.history.before = {n: means for n, means in curves if is_same or n != "loss"}

    def keep(history: TrainingHistory) -> None:
        global _last
        # One that failed at its first step leaves nothing to be compared with.
        if history.is_over and history.steps:
            _last = _Run(loss, _curves(history))

    run.add_listener(keep)


def _curves(history: TrainingHistory) -> dict[str, list[Mean]]:
    curves = Curves(_MAX_POINTS)
    curves.take(history)
    found = {}
    for plot, lines in curves.whole().items():
        # Of a metric only validations are known.
        means = lines.get("mean") or [(*point, 1) for point in lines["validation"]]
        if means:
            found[plot] = means
    return found
