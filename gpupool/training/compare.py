"""Several trainings side by side in a table. Runs on the client.

gpupool.compare(one, two, names=["1 rank", "2 ranks"])
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from gpupool.core.errors import TrainingError
from gpupool.core.formatting import NONE, Table, duration, number, percent
from gpupool.core.options.fields import written
from gpupool.core.options.training_options import TrainingOptions
from gpupool.training.history import TrainingHistory, best_of, figure

RESULTS = ("Ranks", "Steps", "Time", "Per second", "Loss", "Accuracy", "Best")


class Comparison(Table):
    """A row for each training: its name, the options that differ, and what came out (`RESULTS`)."""


def compare(*trainings: Any, names: Sequence[str] | None = None) -> Comparison:
    """The options in which several trainings differ, and what came out, in a table.

    Loss and accuracy are means over the last epoch.

    Args:
        trainings: what `train` has given: results, or runs that have not ended; or their histories.
        names: one for each; numbers unless given.

    Raises:
        TrainingError: there is none, something else is among them, or names are too few.
    """
    histories = [getattr(one, "history", one) for one in trainings]
    names = [str(n) for n in range(1, len(histories) + 1)] if names is None else names
    are_all = all(isinstance(one, TrainingHistory) for one in histories)
    if not histories or not are_all or len(names) != len(histories):
        raise TrainingError(
            "compare takes results of gpupool.train, and as many names: compare(result1, result2, "
            "names=['a', 'b'])."
        )
    usual, differ = TrainingOptions(), dict[str, list[str]]()
    for option in dict.fromkeys(name for one in histories for name in one.options):
        values = [one.options.get(option, written(usual, option)) for one in histories]
        if len(set(values)) > 1:
            differ[option] = values
    results = zip(*map(_results, histories), strict=True)
    rows = zip(names, *differ.values(), *results, strict=True)
    title = f"{len(histories)} trainings"
    return Comparison(title, ("", *differ, *RESULTS), tuple(rows))


def _results(history: TrainingHistory) -> tuple[str, ...]:
    start = history.start
    last = history.steps[-(start.steps_per_epoch if start else 0) or -1 :]
    accuracies = [one.accuracy for one in last if one.accuracy is not None]
    return (
        str(start.world_size) if start else NONE,
        number(len(history.steps)),
        duration(history.elapsed_s),
        f"{number(history.throughput)} {start.unit if start else 'samples'}",
        figure(fmean(one.loss for one in last) if last else None),
        percent(fmean(accuracies) if accuracies else None),
        best_of(history),
    )
