"""What a monitor shows, as plain data: for the browser and the picture that stays. Pure; client.

The view is everything but the points: words, shares, styles and axes that are ready to draw.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any

from gpupool.core.wire.events import RankEvent, StartEvent
from gpupool.notebook.monitor import words
from gpupool.notebook.monitor.curves import Curves, Lines, Measure
from gpupool.notebook.monitor.plots import legend, training_plot
from gpupool.training.history import TrainingHistory

View = dict[str, Any]


class MonitorState(ABC):
    """The picture of one history so far, and what has changed since it was last taken.

    What a call costs does not grow with the length of the history.
    """

    def __init__(self) -> None:
        self.view: View = {}
        self._json: dict[str, tuple[dict[str, Any], str]] = {}

    def take(self, history: Any, status: str) -> tuple[View, Lines]:
        """Add what is new in `history`.

        Returns:
            The entries of the view that are different now, and the new points.
        """
        changed, new = self.take_points(history)
        return changed | self._changed(self._words(history, status)), new

    def take_points(self, history: Any) -> tuple[View, Lines]:
        """The same for the plots alone: nobody reads words that change ten times a second."""
        new = self._points(history)
        return self._changed({"progress": history.progress, **self._plots(history)}), new

    @abstractmethod
    def is_of_another(self, history: Any) -> bool:
        """Whether the points so far do not belong to `history`, or to other plots: send all."""

    @abstractmethod
    def whole(self) -> Lines:
        """All curves, each in a bounded number of points."""

    def has_points(self) -> bool:
        """Whether there is anything to draw."""
        return any(any(lines.values()) for lines in self.whole().values())

    def lines(self) -> str:
        """All curves as JSON."""
        plots = []
        for name, lines in self.whole().items():
            # Encoded again only where points have come: metrics have some once a validation.
            if name not in self._json or self._json[name][0] is not lines:
                self._json[name] = (lines, _encoded(lines))
            plots.append(f"{_encoded(name)}:{self._json[name][1]}")
        return f"{{{','.join(plots)}}}"

    @abstractmethod
    def _points(self, history: Any) -> Lines:
        """The new points."""

    @abstractmethod
    def _plots(self, history: Any) -> View:
        """The entries "plots", "legend" and "axes" of the view."""

    @abstractmethod
    def _words(self, history: Any, status: str) -> View:
        """All other entries of the view."""

    def _changed(self, now: View) -> View:
        before = self.view
        changed = {
            name: entry
            for name, entry in now.items()
            if name not in before or entry != before[name]
        }
        # A new dict: to traitlets one that is changed in place is no change.
        self.view = {**self.view, **changed}
        return changed


def _encoded(value: object) -> str:
    # JSON of browsers has no NaN; curves hold finite values only.
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


class TrainingState(MonitorState):
    """The picture of a `train()`."""

    def __init__(self, max_points: int = 600) -> None:
        super().__init__()
        self._curves = Curves(max_points)
        self._looks_seen: tuple[list[Measure], bool, bool] | None = None
        self._looks: View = {}
        self._ranks_seen: tuple[StartEvent | None, bool, dict[int, RankEvent]] | None = None

    def is_of_another(self, history: TrainingHistory) -> bool:
        """Whether `history` has begun again since it was last taken."""
        return self._curves.is_of_another(history)

    def whole(self) -> Lines:
        """All curves, each in a bounded number of points."""
        return self._curves.whole()

    def _points(self, history: TrainingHistory) -> Lines:
        return self._curves.take(history)

    def _plots(self, history: TrainingHistory) -> View:
        axes = self._curves.axes(history)
        measures = self._curves.measures()
        validated, has_best = bool(history.validations), bool(axes["best"])
        seen = (measures, validated, has_best)
        if seen != self._looks_seen:
            self._looks_seen = seen
            plots = [
                training_plot(m.plot, m.title, "%" if m.whole else "", has_steps=m.has_steps)
                for m in measures
            ]
            entries = legend(plots, validated=validated, has_best=has_best)
            self._looks = {"plots": plots, "legend": entries}
        return {**self._looks, "axes": axes}

    def _words(self, history: TrainingHistory, status: str) -> View:
        return {
            "headline": words.headline(history, status),
            "notice": words.notice(history),
            "bottleneck": words.bottleneck(history),
            "clock": words.clock(history),
            "remaining": words.remaining(history),
            "table": words.table(history),
            "latest": words.latest(history) | self._curves.latest(),
            "stop_label": words.stop_label(history),
            "lost": f"Failed: {words.lost(history)}",
            "hint": "" if history.is_over else words.HINT,
            **self._ranks(history),
        }

    def _ranks(self, history: TrainingHistory) -> View:
        """The table of ranks: made again only when one of them has reported something."""
        # A copy: the history changes its dict in place.
        seen = history.start, history.is_over, dict(history.ranks)
        if seen == self._ranks_seen:
            return {}
        self._ranks_seen = seen
        return {
            "ranks": [asdict(row) for row in words.rank_rows(history)],
            "rank_title": words.rank_title(history),
            "rank_summary": words.rank_summary(history),
            "rank_columns": list(words.RANK_COLUMNS),
        }
