"""Which classes a network takes for which. Runs on the client; draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import TrainingError
from gpupool.core.formatting import percent
from gpupool.core.network import info_of
from gpupool.core.options.datasets import class_names
from gpupool.core.wire.calls import Confusion
from gpupool.pool.pool import Pool
from gpupool.training.history import many
from gpupool.training.inputs import with_targets
from gpupool.training.predict import ask, job_of

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, eq=False)
class ConfusionMatrix:
    """How often each class was taken for each.

    `counts[i, j]` samples (or pixels) of class i were taken for class j: int64, shape (C, C).
    `classes` are the C names. Shares are NaN where nothing is to be counted.
    """

    counts: NDArray[np.int64]
    classes: tuple[str, ...]

    @property
    def num_samples(self) -> int:
        """All that have a class."""
        return int(self.counts.sum())

    @property
    def accuracy(self) -> float:
        """The share (0..1) whose class was found."""
        return float(_shares(np.trace(self.counts), self.counts.sum()))

    @property
    def recall(self) -> NDArray[np.float64]:
        """The share of each class that was found."""
        return _shares(np.diag(self.counts), self.counts.sum(1))

    @property
    def precision(self) -> NDArray[np.float64]:
        """The share of what was taken for each class that is right."""
        return _shares(np.diag(self.counts), self.counts.sum(0))

    @property
    def shares(self) -> NDArray[np.float64]:
        """`counts` as shares of the samples of each true class."""
        return _shares(self.counts, self.counts.sum(1, keepdims=True))

    def most_confused(self, num: int = 5) -> list[tuple[str, str, int]]:
        """The pairs (true, predicted, how often) that were confused most often, worst first."""
        wrong = self.counts - np.diag(np.diag(self.counts))
        places = np.argwhere(wrong).tolist()
        most = sorted(places, key=lambda place: -wrong[*place])[:num]  # of equals the first classes
        return [(self.classes[i], self.classes[j], int(wrong[i, j])) for i, j in most]

    def summary(self) -> str:
        """The whole in one line."""
        share = percent(self.accuracy if self.num_samples else None)
        samples = many(self.num_samples, "sample")
        return f"accuracy {share} on {samples}, {len(self.classes)} classes"

    def __repr__(self) -> str:
        pairs = [f"  {true} taken for {said}: {num:,}" for true, said, num in self.most_confused()]
        return "\n".join([f"ConfusionMatrix: {self.summary()}", *pairs])


def confusion(
    model: nn.Module,
    dataset: Any,
    *,
    classes: Sequence[str] | None = None,
    pool: Pool | None = None,
    **reading: Any,
) -> ConfusionMatrix:
    """Count which class `model` takes each sample for: pixels, where targets are maps.

    Of outputs with one number, those above 0 are the second of two classes. Targets of -100 count
    nowhere.

    Args:
        classes: names by index; unless given those of the network, of the data set, or indices.
        pool: where; the notebook's pool, which is started if none runs, unless given.
        reading: as those of `predict`.

    Raises:
        TrainingError: the input is not a network or not a data set, or `classes` are too few.
        OptionsError: an option is wrong, or does nothing here.
        SpmdError: a rank failed.
    """
    dataset = with_targets(dataset, model)
    counts = ask("Counting classes", job_of("confusion", model, dataset, reading), pool, Confusion)
    # A rank without a sample does not know how many classes the network has, and sends None.
    total = np.sum([np.array(c, np.int64) for c in counts if c is not None], axis=0)
    if classes is not None and len(classes) != len(total):
        raise TrainingError(
            f"classes= has {len(classes)} names, the network has {len(total)} outputs."
        )
    known = classes or info_of(model).classes or class_names(dataset)
    # The network may have more outputs than there are names, and fewer.
    names = [str(name) for name in (*known, *range(len(known), len(total)))]
    return ConfusionMatrix(total, tuple(names[: len(total)]))


def _shares(part: Any, whole: Any) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 is NaN
        return np.asarray(np.true_divide(part, whole), np.float64)
