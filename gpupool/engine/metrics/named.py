"""The metrics that have a name: sums over samples, and what is computed of them in the end.

Runs on engines. The sums of two parts of the data give those of the whole, so a metric does not
depend on who has seen which sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpupool.core.errors import TrainingError
from gpupool.data.reading.trees import first_tensor
from gpupool.engine.numerics.class_loss import classes_first, fits_first
from gpupool.engine.numerics.losses import aligned

# Not by torchmetrics, which is not exact here: its R2 subtracts large squares, its Jaccard index
# counts in float32, and its AUC squashes some batches and not others, and has 0 for absent classes.
Measured = Callable[[Any, Any], Tensor]


@dataclass
class Sums:
    """One metric: `measure` gives the sums of a batch, `value` what follows from those of all."""

    measure: Measured
    value: Callable[[Tensor], float]
    combine: Callable[[Tensor, Tensor], Tensor] = torch.add
    _sums: Tensor | None = None

    def reset(self) -> None:
        """Forget everything."""
        self._sums = None

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch; nothing is read from the device."""
        sums = self.measure(outputs, targets)
        self._sums = sums if self._sums is None else self.combine(self._sums, sums)

    def state(self) -> Tensor | None:
        """The sums, on the CPU."""
        return None if self._sums is None else self._sums.cpu()

    def merged(self, states: Sequence[Tensor]) -> float:
        """The value, of the sums of all ranks."""
        return self.value(reduce(self.combine, states))


def named(name: str, ignored: int) -> Sums:
    """The metric of this name; targets that are `ignored` are left out."""
    if name in _OF_CLASSES:
        measure, value = _OF_CLASSES[name]
        return Sums(partial(measure, ignored=ignored), value)
    if name == "auc":
        return Sums(_scores, _auc, lambda a, b: torch.cat([a, b]))
    if name == "r2":
        return Sums(_moments, _r2, _joint_moments)
    return Sums(*_OF_NUMBERS[name])


def mean_of(function: Callable[[Any, Any], Any]) -> Sums:
    """A function (outputs, targets) -> mean over the samples of a batch."""

    def measure(outputs: Any, targets: Any) -> Tensor:
        first = first_tensor(targets)
        num = 1 if first is None or not first.ndim else len(first)
        value = torch.as_tensor(function(outputs, targets), dtype=torch.float64)
        return torch.stack([value * num, torch.full_like(value, num)])

    return Sums(measure, _mean)


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


def _right(outputs: Any, targets: Any, ignored: int) -> Tensor:
    """[right, all]."""
    predicted, actual, _ = classes(outputs, targets)
    counts = actual != ignored  # also where the network can predict that class
    return torch.stack([((predicted == actual) & counts).sum(), counts.sum()]).double()


def _among_five(outputs: Any, targets: Any, ignored: int) -> Tensor:
    """[among the five highest scores, all]."""
    _, actual, num_classes = classes(outputs, targets)
    if num_classes == 2:
        return _right(outputs, targets, ignored)
    highest = outputs.topk(min(5, num_classes), dim=1).indices
    counts = actual != ignored
    found = (highest == actual.unsqueeze(1)).any(1) & counts
    return torch.stack([found.sum(), counts.sum()]).double()


def _surprise(outputs: Any, targets: Any, ignored: int) -> Tensor:
    """[sum of the cross entropies, how many]."""
    _require_tensors(outputs, targets)
    outputs = classes_first(outputs, targets)
    total = functional.cross_entropy(
        outputs.double(), targets, ignore_index=ignored, reduction="sum"
    )
    return torch.stack([total, (targets != ignored).sum().double()])


def _by_class(outputs: Any, targets: Any, ignored: int) -> Tensor:
    """[right, predicted, actual] of each class, shape (3, C)."""
    predicted, actual, num_classes = classes(outputs, targets)
    counts = confusion_counts(predicted, actual, num_classes, ignored)
    return torch.stack([counts.diagonal(), counts.sum(0), counts.sum(1)])


def confusion_counts(predicted: Tensor, actual: Tensor, num_classes: int, ignored: int) -> Tensor:
    """How often each class (row) was taken for each (column): float64 (C, C) on the device.

    Raises TrainingError if a class is not in 0..C-1; on a GPU, where that would be read from the
    device, it is an error of torch.
    """
    actual, predicted = actual.flatten(), predicted.flatten()
    counts = actual != ignored
    if actual.device.type == "cpu" and bool(((actual < 0) | (actual >= num_classes))[counts].any()):
        wrong = sorted(set(actual[counts].tolist()) - set(range(num_classes)))[:3]
        raise TrainingError(
            f"the targets have class {', '.join(map(str, wrong))}, the network has {num_classes} "
            f"outputs: classes are 0 to {num_classes - 1}."
        )
    # What is left out is counted in a place of its own: selecting the others would need their
    # number, which is read from the device.
    place = (actual * num_classes + predicted).where(counts, num_classes**2)
    flat = torch.zeros(num_classes**2 + 1, dtype=torch.float64, device=actual.device)
    flat.scatter_add_(
        0, place, torch.ones((), dtype=flat.dtype, device=flat.device).expand_as(place)
    )
    return flat[:-1].view(num_classes, num_classes)


def _mean(sums: Tensor) -> float:
    return float(sums[0] / sums[1]) if sums[1] else float("nan")


def _macro(share: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], sums: Tensor) -> float:
    """The mean over the classes that occur or are predicted; 0 where a class has no such share."""
    above, below = share(*sums)
    occurs = (sums[1] + sums[2]) > 0
    if not occurs.any():
        return float("nan")
    # `clamp`: a class that is never predicted (or never true) counts as 0, not as NaN.
    return float((above / below.clamp(min=1))[occurs].mean())


_OF_CLASSES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], float]]] = {
    "accuracy": (_right, _mean),
    "pixel_accuracy": (_right, _mean),
    "token_accuracy": (_right, _mean),
    "perplexity": (_surprise, lambda sums: math.exp(min(_mean(sums), 700.0))),
    "top5": (_among_five, _mean),
    "precision": (_by_class, partial(_macro, lambda right, said, true: (right, said))),
    "recall": (_by_class, partial(_macro, lambda right, said, true: (right, true))),
    "f1": (_by_class, partial(_macro, lambda right, said, true: (2 * right, said + true))),
    "mean_iou": (
        _by_class,
        partial(_macro, lambda right, said, true: (right, said + true - right)),
    ),
}


# ---- scores ------------------------------------------------------------------------------------


def _scores(outputs: Any, targets: Any) -> Tensor:
    """The class of each sample and its scores, shape (N, 1 + C); C is 1 for two classes."""
    _, actual, num_classes = classes(outputs, targets)
    scores = outputs.detach().double()
    if num_classes == 2:
        # Two scores order the samples by their difference, as softmax does.
        scores = scores[:, 1] - scores[:, 0] if scores.shape[1:] == (2,) else scores.flatten()
        return torch.stack([actual.double().flatten(), scores], dim=1)
    return torch.cat([actual.double()[:, None], scores.softmax(1)], dim=1)


def _auc(table: Tensor) -> float:
    """Area under the ROC curve: the chance that a sample of a class has a higher score for it than
    one of another class, ties counted half; of more than two classes, the mean of all that occur.
    """
    actual, scores = table[:, 0].long(), table[:, 1:]
    columns = [(actual == 1, scores[:, 0])]
    if scores.shape[1] > 1:
        columns = [(actual == c, scores[:, c]) for c in range(scores.shape[1])]
    areas = [_area(*column) for column in columns if 0 < int(column[0].sum()) < len(actual)]
    return sum(areas) / len(areas) if areas else float("nan")


def _area(is_class: Tensor, scores: Tensor) -> float:
    """By the sum of ranks, as Mann and Whitney (1947) count them; equal scores share their rank."""
    _, place, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts - 1) / 2)[place]
    num = float(is_class.sum())
    others = len(scores) - num
    return float((ranks[is_class].sum() - num * (num + 1) / 2) / (num * others))


# ---- numbers -----------------------------------------------------------------------------------


def _differences(outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
    _require_tensors(outputs, targets)
    outputs, targets = aligned(outputs.detach().double(), targets)
    return outputs, targets


def _squares(outputs: Any, targets: Any) -> Tensor:
    """[sum of squared differences, how many]."""
    found, true = _differences(outputs, targets)
    total = (found - true).square().sum()
    return torch.stack([total, torch.full_like(total, true.numel())])


def _distances(outputs: Any, targets: Any) -> Tensor:
    """[sum of absolute differences, how many]."""
    found, true = _differences(outputs, targets)
    total = (found - true).abs().sum()
    return torch.stack([total, torch.full_like(total, true.numel())])


def _moments(outputs: Any, targets: Any) -> Tensor:
    """[how many, mean, squared deviations from it, squared errors] of each output: (4, K)."""
    found, true = _differences(outputs, targets)
    found, true = found.reshape(len(found), -1), true.reshape(len(true), -1)
    mean = true.mean(0)
    spread, error = (true - mean).square().sum(0), (found - true).square().sum(0)
    return torch.stack([torch.full_like(mean, len(true)), mean, spread, error])


def _joint_moments(one: Tensor, other: Tensor) -> Tensor:
    """Of two parts together: Chan, Golub and LeVeque (1979), equation 2.1."""
    num = one[0] + other[0]
    apart = other[1] - one[1]
    mean = one[1] + apart * other[0] / num
    spread = one[2] + other[2] + apart.square() * one[0] * other[0] / num
    return torch.stack([num, mean, spread, one[3] + other[3]])


def _r2(moments: Tensor) -> float:
    """The mean of the outputs' 1 - errors / deviations; 0 where a target does not vary."""
    num, _, spread, error = moments
    # One sample has no spread.
    if num[0] < 2:
        return float("nan")
    constant = torch.where(error == 0, 1.0, 0.0)  # as scikit-learn has it
    return float(torch.where(spread > 0, 1 - error / spread, constant).mean())


_OF_NUMBERS: dict[str, tuple[Measured, Callable[[Tensor], float]]] = {
    "mse": (_squares, _mean),
    "rmse": (_squares, lambda sums: _mean(sums) ** 0.5),
    "mae": (_distances, _mean),
}


def _require_tensors(outputs: Any, targets: Any) -> None:
    for what, value in (("outputs", outputs), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise TrainingError(
                f"the {what} are a {type(value).__name__}, not a tensor: name the output that a "
                "metric is of, metrics={'mask': 'mean_iou'}."
            )
