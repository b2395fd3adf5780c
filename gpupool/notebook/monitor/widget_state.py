"""What the live monitor of a training sends to the browser, as plain data. Pure; client.

The view is everything but the points: words, shares and axes that are ready to draw.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

from gpupool.core.wire.events import RankEvent, StartEvent
from gpupool.notebook.monitor import words
from gpupool.notebook.monitor.curves import Curves, Lines
from gpupool.training.history import TrainingHistory

View = dict[str, Any]


class MonitorState:
    """The picture of one training so far, and what has changed since it was last taken.

    What a call costs does not grow with the length of the training.
    """

    def __init__(self) -> None:
        self._curves = Curves()
        self._ranks_told: tuple[StartEvent | None, bool, dict[int, RankEvent]] | None = None
        self.view: View = {}
        self.take(TrainingHistory(), "starting")

    def take(self, history: TrainingHistory, status: str) -> tuple[View, Lines]:
        """Take in what is new in `history`.

        Returns:
            The entries of the view that are different now, and the new points.
        """
        changed, new = self.take_points(history)
        return changed | self._changed(self._words(history, status)), new

    def take_points(self, history: TrainingHistory) -> tuple[View, Lines]:
        """The same for the plots alone: nobody reads words that change ten times a second."""
        new = self._curves.take(history)
        axes = self._curves.axes(history)
        return self._changed({"axes": axes, "progress": history.progress}), new

    def _changed(self, now: View) -> View:
        changed = {name: entry for name, entry in now.items() if entry != self.view.get(name)}
        self.view = {**self.view, **changed}
        return changed

    def _words(self, history: TrainingHistory, status: str) -> View:
        return {
            "headline": words.headline(history, status),
            "notice": words.notice(history),
            "remaining": words.remaining(history),
            "table": words.table(history),
            "latest": words.latest(history),
            "stop_label": words.stop_label(history),
            "file_name": file_name(history),
            **self._ranks(history),
        }

    def is_of_another(self, history: TrainingHistory) -> bool:
        """Whether `history` has begun anew since it was last taken."""
        return self._curves.is_of_another(history)

    def lines(self) -> str:
        """All curves as JSON, each in a bounded number of points."""
        return json.dumps(self._curves.whole(), separators=(",", ":"), allow_nan=False)

    def _ranks(self, history: TrainingHistory) -> View:
        """The strip of ranks: made anew only when one of them has told something."""
        told = history.start, history.is_over, dict(history.ranks)
        if told == self._ranks_told:
            return {}
        self._ranks_told = told
        return {
            "ranks": [asdict(row) for row in words.rank_rows(history)],
            "rank_title": words.rank_title(history),
            "rank_summary": words.rank_summary(history),
            "rank_columns": list(words.RANK_COLUMNS),
        }


def file_name(history: TrainingHistory) -> str:
    """What a file with the plots is called, without its ending: when it began, and how far it is.

    >>> file_name(TrainingHistory())
    'training'
    """
    parts = ["training"]
    if history.start is not None and history.start.started_at:
        parts.append(time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(history.start.started_at)))
    if history.steps:
        parts.append(f"step_{history.steps[-1].step}")
    return "_".join(parts)
