"""Several trainings side by side: curves over time and steps, and a table. Runs on the client.

gpupool.compare(one, two, names=["1 rank", "2 ranks"])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from gpupool.core.errors import TrainingError
from gpupool.core.formatting import NONE, duration, number, percent, shortened
from gpupool.core.options.training_options import TrainingOptions, written
from gpupool.training.history import HALF_LIFE, TrainingHistory
from gpupool.training.history import smoothed as smoothed_means
from gpupool.training.phrases import best_of, figure

COLUMNS = ("", "Ranks", "Batch", "Steps", "Time", "Per second", "Loss", "Accuracy", "Best")
_MAX_NAME_CHARS = 60


@dataclass(frozen=True)
class Comparison:
    """Trainings by name; a picture with a table in a notebook, the table elsewhere."""

    histories: tuple[TrainingHistory, ...]
    names: tuple[str, ...]
    numbered: bool = False  # whether the names say what the columns of `table` say

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each training, with the columns `COLUMNS`; loss and accuracy are smoothed."""
        first = self.histories[0].throughput
        return [
            _row(name, history, first)
            for name, history in zip(self.names, self.histories, strict=True)
        ]

    def differences(self) -> dict[str, tuple[str, ...]]:
        """The options that differ, each with its value in every training as it is written; those
        that were not given stand as usual: {"lr": ("0.1", "0.01")}."""
        return _differences(self.histories)

    def header(self) -> tuple[str, ...]:
        """The columns of `table`."""
        return (COLUMNS[0], *self.differences(), *COLUMNS[1:])

    def table(self) -> list[tuple[str, ...]]:
        """`rows`, with the options that differ behind the name.

        Unless names were given, a number stands there: names would repeat the columns.
        """
        options = self.differences().values()
        return [
            (
                str(place + 1) if self.numbered else name,
                *(values[place] for values in options),
                *rest,
            )
            for place, (name, *rest) in enumerate(self.rows())
        ]

    def __repr__(self) -> str:
        rows = [self.header(), *self.table()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join(lines)


def compare(*trainings: Any, names: Sequence[str] | None = None) -> Comparison:
    """Accuracy and loss of several trainings, over time and over steps, and a table of the options
    that differ and of what came out.

    Args:
        trainings: what `train` has given: results, or runs that have not ended; or their histories.
        names: one for each; unless given a number with the ranks and options that differ.

    Raises:
        TrainingError: there is none, something else is among them, or names are too few.
    """
    histories = tuple(getattr(one, "history", one) for one in trainings)
    if not histories or not all(isinstance(one, TrainingHistory) for one in histories):
        raise TrainingError("compare takes results of gpupool.train: compare(result1, result2).")
    is_numbered = names is None
    if names is None:
        names = _names(histories)
    if len(names) != len(histories):
        raise TrainingError(
            f"compare: there are {len(histories)} trainings and {len(names)} names; give one for "
            "each."
        )
    return Comparison(histories, tuple(map(str, names)), is_numbered)


def smoothed(history: TrainingHistory, what: str) -> list[float | None]:
    """Loss, or accuracy (0..1), of each step without its noise; None where there is none."""
    values = {s.step: s.loss if what == "loss" else s.accuracy for s in history.steps}
    means = [(s, v, 1) for s, v in values.items() if v is not None and math.isfinite(v)]
    found = dict(smoothed_means(means, HALF_LIFE * len(values)))
    return [found.get(step) for step in values]


def _row(name: str, history: TrainingHistory, first: float) -> tuple[str, ...]:
    start, speed = history.start, history.throughput
    change = "" if not first or speed == first else f" ({100 * (speed / first - 1):+.0f} %)"
    last = {what: (smoothed(history, what) or [None])[-1] for what in ("loss", "accuracy")}
    return (
        name,
        str(start.world_size) if start else NONE,
        number(start.batch_size) if start else NONE,
        number(len(history.steps)),
        duration(history.elapsed_s),
        f"{number(speed)} {start.unit if start else 'samples'}{change}",
        figure(last["loss"]),
        NONE if last["accuracy"] is None else percent(last["accuracy"]),
        best_of(history),
    )


def _differences(histories: Sequence[TrainingHistory]) -> dict[str, tuple[str, ...]]:
    usual = TrainingOptions()
    # In the order in which the options stand, whichever training gives one.
    known = [one.name for one in fields(usual)]
    given = [name for name in known if any(name in one.options for one in histories)]
    values = {
        name: tuple(one.options.get(name, written(usual, name)) for one in histories)
        for name in given
    }
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def _names(histories: Sequence[TrainingHistory]) -> list[str]:
    """A number for each, with what distinguishes it from the others: "1: 2 ranks, lr=0.1"."""
    ranks = [_ranks(one) for one in histories]
    differences = _differences(histories)
    names = []
    for place, own in enumerate(ranks):
        parts = [own] if len(set(ranks)) > 1 or not differences else []
        parts += [f"{name}={values[place]}" for name, values in differences.items()]
        names.append(shortened(f"{place + 1}: {', '.join(parts)}", _MAX_NAME_CHARS))
    return names


def _ranks(history: TrainingHistory) -> str:
    size = history.start.world_size if history.start else 0
    return f"{size} rank{'s' if size != 1 else ''}"
