"""The metrics that have a name: which of torchmetrics each is, and what it is given of a batch.

Runs on engines. torchmetrics is imported when one is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpupool.core.errors import TrainingError
from gpupool.data.reading.trees import first_tensor
from gpupool.engine.metrics.torchmetrics import TorchMetric
from gpupool.engine.numerics.class_loss import NO_CLASS, classes_first, fits_first
from gpupool.engine.numerics.losses import aligned, side_by_side

_OF_CLASSES = {  # the class in torchmetrics, and how it averages over the classes
    "accuracy": ("MulticlassAccuracy", "micro"),
    "pixel_accuracy": ("MulticlassAccuracy", "micro"),
    "token_accuracy": ("MulticlassAccuracy", "micro"),
    "top5": ("MulticlassAccuracy", "micro"),
    "precision": ("MulticlassPrecision", "macro"),
    "recall": ("MulticlassRecall", "macro"),
    "f1": ("MulticlassF1Score", "macro"),
    "mean_iou": ("MulticlassJaccardIndex", "macro"),
    "auc": ("MulticlassAUROC", "macro"),
}


Given = tuple[int, tuple[Any, ...]]


class Measured:
    """A metric of torchmetrics that is made with the first batch, which shows the classes.

    `given`, of outputs and targets, says of how many classes (or numbers a sample) they are, and
    what the metric is updated with; None where nothing of a batch counts. `made` makes a metric for
    as many, and `value` is what follows from what that computes.
    """

    def __init__(
        self,
        given: Callable[[Any, Any], Given | None],
        made: Callable[[int], Any],
        value: Callable[[Any], float] = float,
    ) -> None:
        self._given, self._made, self._value = given, made, value
        self._metric: TorchMetric | None = None

    def reset(self) -> None:
        """Forget everything."""
        self._metric = None

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch."""
        found = self._given(outputs, targets)
        if found is None:
            return
        size, given = found
        if self._metric is None:
            self._metric = TorchMetric(self._made(size), given[0].device, in_float64=True)
        self._metric.update(*given)

    def state(self) -> Any:
        """What this rank has seen; None if nothing."""
        return None if self._metric is None else self._metric.state()

    def merged(self, states: Sequence[Any]) -> Any:
        """The value, from the states of all ranks."""
        assert self._metric is not None
        return self._value(self._metric.merged(states))


def named(name: str, ignored: int) -> Measured:
    """The metric of this name; targets that are `ignored` are left out."""
    if name in _OF_CLASSES:
        return Measured(partial(_of_rows, name, ignored), partial(_for_classes, name))
    if name == "perplexity":
        return Measured(partial(_surprise, ignored), _mean, lambda mean: float(mean.exp()))
    if name == "r2":  # not R2Score, for which errors of less than 1e-4 are none
        return Measured(_numbers, partial(_for_numbers, name), lambda error: 1 - float(error))
    return Measured(_numbers, partial(_for_numbers, name))


def mean_of(function: Callable[[Any, Any], Any]) -> Measured:
    """A function (outputs, targets) -> mean over the samples of a batch."""

    def given(outputs: Any, targets: Any) -> Given:
        first = first_tensor(targets)
        num = 1 if first is None or not first.ndim else len(first)
        with side_by_side(outputs, targets):
            value = function(outputs, targets)
        return 1, (torch.as_tensor(value, dtype=torch.float64), num)

    return Measured(given, _mean)


def _mean(size: int) -> Any:
    from torchmetrics import MeanMetric

    # A NaN stays one. By "disable" torchmetrics 1.9 would count each batch once, whatever its size.
    return MeanMetric(nan_strategy=math.nan)


# ---- classes -----------------------------------------------------------------------------------


def classes(outputs: Any, targets: Any) -> tuple[Tensor, Tensor, int]:
    """The class that is predicted and the one that is true, and how many classes there are.

    Outputs (N, C, ...), or (N, ..., C) as of text, are scores of C classes; without that dimension,
    or with C = 1, they are logits of the second of two. The classes have the shape of the targets,
    (N, ...).

    Raises TrainingError for shapes that do not fit.
    """
    _require_tensors(outputs, targets)
    outputs = classes_first(outputs, targets)
    if fits_first(outputs, targets):
        return outputs.argmax(1), targets.long(), outputs.shape[1]
    if outputs.ndim > 1 and outputs.shape[1] == 1:
        outputs = outputs.squeeze(1)
    if targets.ndim > outputs.ndim and targets.shape[1] == 1:
        targets = targets.squeeze(1)
    if outputs.shape != targets.shape or (outputs.ndim > 1 and outputs.ndim < 3):
        raise TrainingError(
            f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} are not scores of "
            "classes and classes: a metric of classes needs (N, C, ...) and (N, ...)."
        )
    return (outputs > 0).long(), targets.round().long(), 2


def confusion_counts(predicted: Tensor, actual: Tensor, num_classes: int) -> Tensor:
    """How often each class (row) was taken for each (column): whole numbers (C, C)."""
    counts = actual != NO_CLASS
    actual, predicted = actual[counts], predicted[counts]
    _check_classes(actual, num_classes)
    places = actual * num_classes + predicted
    return places.bincount(minlength=num_classes**2).view(num_classes, num_classes)


def _check_classes(actual: Tensor, num_classes: int) -> None:
    if len(actual) and not 0 <= int(actual.min()) <= int(actual.max()) < num_classes:
        wrong = sorted(set(actual.tolist()) - set(range(num_classes)))[:3]
        raise TrainingError(
            f"the targets have class {', '.join(map(str, wrong))}, the network has {num_classes} "
            f"outputs: classes are 0 to {num_classes - 1}."
        )


def _of_rows(name: str, ignored: int, outputs: Any, targets: Any) -> Given | None:
    """For each sample (or pixel) that has a class what is predicted, and that class."""
    predicted, actual, num = classes(outputs, targets)
    counts = actual.flatten() != ignored
    actual = actual.flatten()[counts]
    _check_classes(actual, num)
    if not len(actual):
        return None
    if name == "auc" or (name == "top5" and num > 2):
        return num, (_chances(classes_first(outputs, targets), num)[counts], actual)
    return num, (predicted.flatten()[counts], actual)


def _chances(outputs: Tensor, num: int) -> Tensor:
    """Probabilities of the classes (rows, num); of two classes those of the second (rows,)."""
    outputs = outputs.detach().double()
    if num > 2 or outputs.shape[1:2] == (2,):
        rows = outputs.movedim(1, -1).flatten(0, -2).softmax(1)
        return rows if num > 2 else rows[:, 1]
    return outputs.flatten().sigmoid()


def _for_classes(name: str, num: int) -> Any:
    from torchmetrics import classification

    if name == "auc":
        return (
            classification.BinaryAUROC()
            if num == 2
            else classification.MulticlassAUROC(num, average="macro")
        )
    kind, average = _OF_CLASSES[name]
    more = {"top_k": min(5, num)} if name == "top5" and num > 2 else {}
    return getattr(classification, kind)(num, average=average, **more)


def _surprise(ignored: int, outputs: Any, targets: Any) -> Given | None:
    """The mean cross entropy, and over how many."""
    _require_tensors(outputs, targets)
    num = int((targets != ignored).sum())
    if not num:
        return None
    outputs = classes_first(outputs, targets).double()
    return 1, (functional.cross_entropy(outputs, targets, ignore_index=ignored), num)


# ---- numbers -----------------------------------------------------------------------------------


def _numbers(outputs: Any, targets: Any) -> Given:
    _require_tensors(outputs, targets)
    outputs, targets = aligned(outputs.detach().double(), targets)
    rows = tuple(part.reshape(len(part), -1) for part in (outputs, targets))
    return rows[0].shape[1], rows


def _for_numbers(name: str, size: int) -> Any:
    from torchmetrics import regression

    if name == "r2":
        return regression.RelativeSquaredError(size)
    if name == "mae":
        return regression.MeanAbsoluteError()
    return regression.MeanSquaredError(squared=name == "mse")


def _require_tensors(outputs: Any, targets: Any) -> None:
    for what, value in (("outputs", outputs), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise TrainingError(
                f"the {what} are a {type(value).__name__}, not a tensor: name the output that a "
                "metric is of, metrics={'mask': 'mean_iou'}."
            )
