"""Which classes a network takes for which. Runs on the client; draws nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import TrainingError
from gpupool.core.formatting import NONE, percent, short_name
from gpupool.core.jobs import InferenceJob
from gpupool.core.network import info_of
from gpupool.core.options.class_names import class_names
from gpupool.core.wire.calls import Confusion
from gpupool.pool.pool import Pool
from gpupool.training.call import ask, inference_options
from gpupool.training.inputs import with_targets

if TYPE_CHECKING:
    from torch import nn

_MAX_PRINTED = 20  # classes
VALUES = ("counts", "shares")
SORTS = ("class", "name", "recall", "precision", "samples")


@dataclass(frozen=True, eq=False)
class ConfusionMatrix:
    """How often each class was taken for each.

    `counts[i, j]` samples (or pixels) of class i were taken for class j: int64, shape (C, C).
    `classes` are the C names. `values` and `sort` say how it is shown, as `shown` has them.
    """

    counts: NDArray[np.int64]
    classes: tuple[str, ...]
    values: str = "counts"
    sort: str = "class"

    def shown(self, values: str = "counts", sort: str = "class") -> ConfusionMatrix:
        """The same matrix, shown in another way: `matrix.shown("shares", sort="recall")`.

        Args:
            values: "counts", or "shares" of the samples of each true class.
            sort: by what classes are ordered in the picture and in text: "class" (their index),
                "name", "recall" or "precision" (lowest first), or "samples" (most first).

        Raises:
            TrainingError: one of them is another word.
        """
        for name, value, known in (("values", values, VALUES), ("sort", sort, SORTS)):
            if value not in known:
                raise TrainingError(
                    f"{name}={value!r}: choose one of {', '.join(map(repr, known))}."
                )
        return replace(self, values=values, sort=sort)

    @property
    def order(self) -> list[int]:
        """The indices of the classes as `sort` has them."""
        num = len(self.classes)
        keys: dict[str, Sequence[Any]] = {
            "class": range(num),
            "name": self.classes,
            "recall": np.nan_to_num(self.recall, nan=-1.0).tolist(),
            "precision": np.nan_to_num(self.precision, nan=-1.0).tolist(),
            "samples": (-self.counts.sum(1)).tolist(),
        }
        return sorted(range(num), key=lambda number: (keys[self.sort][number], number))

    @property
    def num_samples(self) -> int:
        """All that have a class."""
        return int(self.counts.sum())

    @property
    def accuracy(self) -> float:
        """The share (0..1) whose class was found; NaN without samples."""
        # `_shares` gives NaN for 0 / 0, where plain Python raises.
        return float(_shares(np.trace(self.counts), self.counts.sum()))

    @property
    def recall(self) -> NDArray[np.float64]:
        """The share of each class that was found; NaN where it does not occur."""
        return _shares(np.diag(self.counts), self.counts.sum(1))

    @property
    def precision(self) -> NDArray[np.float64]:
        """The share of what was taken for each class that is right; NaN where nothing was."""
        return _shares(np.diag(self.counts), self.counts.sum(0))

    def normalized(self, by: str = "true") -> NDArray[np.float64]:
        """Shares of each row ("true"), each column ("predicted"), or of all ("all")."""
        if by not in ("true", "predicted", "all"):
            raise TrainingError(f"by={by!r}: normalize by 'true', 'predicted' or 'all'.")
        axis = {"true": 1, "predicted": 0, "all": None}[by]
        return _shares(self.counts, self.counts.sum(axis=axis, keepdims=True))

    def most_confused(self, num: int = 5) -> list[tuple[str, str, int]]:
        """The pairs (true, predicted, how often) that were confused most often, worst first."""
        wrong = self.counts.copy()
        np.fill_diagonal(wrong, 0)
        # Stable, so pairs that are equally frequent come in the order of their classes.
        order = np.argsort(-wrong, axis=None, kind="stable")[:num]
        pairs = [divmod(int(place), len(self.classes)) for place in order]
        return [
            (self.classes[i], self.classes[j], int(wrong[i, j])) for i, j in pairs if wrong[i, j]
        ]

    def summary(self) -> str:
        """The whole in one line."""
        share = percent(self.accuracy if self.num_samples else None)
        num, classes = self.num_samples, len(self.classes)
        samples = f"{num:,} sample{'s' if num != 1 else ''}"
        return f"accuracy {share} on {samples}, {classes} class{'es' if classes != 1 else ''}"

    def __repr__(self) -> str:
        lines = [f"ConfusionMatrix: {self.summary()}"]
        if len(self.classes) <= _MAX_PRINTED:
            lines += _table(self)
        else:
            lines += [f"  {true} taken for {said}: {n:,}" for true, said, n in self.most_confused()]
        return "\n".join(lines)


def confusion(
    model: nn.Module,
    dataset: Any,
    *,
    classes: Sequence[str] | None = None,
    batch_size: int = 256,
    precision: str = "float32",
    pool: Pool | None = None,
    **reading: Any,
) -> ConfusionMatrix:
    """Count which class `model` takes each sample for: pixels, where targets are maps.

    Of outputs with one number, those above 0 are the second of two classes. Targets of -100 count
    nowhere.

    Args:
        classes: names by index; unless given those of the network, of the data set, or indices.
        batch_size: samples per step over all ranks.
        precision: "float32", or "bf16" or "fp16" by `torch.autocast`.
        pool: where; the notebook's pool, which is started if none runs, unless given.
        reading: options of `TrainingOptions` that say how samples are read.

    Raises:
        TrainingError: the input is not a network or not a data set, or `classes` are too few.
        OptionsError: an option is wrong, or does nothing here.
        SpmdError: a rank failed.
    """
    dataset = with_targets(dataset, model)
    options = inference_options("confusion", batch_size=batch_size, precision=precision, **reading)
    job = InferenceJob(model, dataset, options)
    counts = ask("confusion", pool, job, Confusion)
    # A rank without a sample does not know how many classes the network has, and sends None.
    total = np.sum([np.array(c, np.int64) for c in counts if c is not None], axis=0)
    known = info_of(model).classes or class_names(dataset)
    names = list(known) if classes is None else [str(name) for name in classes]
    if classes is not None and len(names) != len(total):
        raise TrainingError(
            f"classes= has {len(names)} names, the network has {len(total)} outputs."
        )
    if len(names) != len(total):  # the network may know more classes than occur here
        names = names[: len(total)] + [str(i) for i in range(len(names), len(total))]
    return ConfusionMatrix(total, tuple(names))


def _shares(part: Any, whole: Any) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.true_divide(part, whole), np.float64)


def share_word(share: float) -> str:
    """A share of a row in three digits, as "12 %" or "3.4 %"; a dash for what has none.

    >>> share_word(0.123), share_word(0.034), share_word(float("nan"))
    ('12 %', '3.4 %', '–')
    """
    if math.isnan(share):
        return NONE
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def _table(matrix: ConfusionMatrix) -> list[str]:
    """Rows of true classes, columns of predicted ones, as text; recall and precision beside it."""
    order, names = matrix.order, [short_name(name, 12) for name in matrix.classes]
    counts = [[str(n) for n in row] for row in matrix.counts.tolist()]
    if matrix.values == "shares":
        counts = [[share_word(share) for share in row] for row in matrix.normalized().tolist()]
    recall, precision = (
        [share_word(one) for one in part] for part in (matrix.recall, matrix.precision)
    )
    rows = [["", *(names[n] for n in order), "recall"]]
    rows += [[names[n], *(counts[n][m] for m in order), recall[n]] for n in order]
    rows.append(["precision", *(precision[n] for n in order), ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
