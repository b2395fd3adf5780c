"""The metrics that have a name. Runs on engines.

Each is a value of sums over samples (or pixels, or tokens), in float64, that ranks add up.
torchmetrics has them too; to import it takes seconds where many packages are installed, so that is
done for "auc" alone, which needs all scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpupool.core.errors import TrainingError
from gpupool.data.reading.trees import first_tensor
from gpupool.engine.numerics.losses import aligned, classes_first, fits_first, side_by_side

Sums = Callable[[Any, Any], Tensor]


@dataclass
class Summed:
    """A metric: `value` of what `sums` gives of all batches, put together by `join`."""

    sums: Sums
    value: Callable[[Tensor], Tensor]
    join: Callable[[list[Tensor]], Tensor] = lambda sums: torch.stack(sums).sum(0)
    seen: Tensor | None = None

    def reset(self) -> None:
        """Forget everything."""
        self.seen = None

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch."""
        found = self.sums(outputs, targets)
        self.seen = found if self.seen is None else self.join([self.seen, found])

    def state(self) -> Tensor | None:
        """What this rank has seen; None if nothing."""
        return None if self.seen is None else self.seen.cpu()

    def merged(self, states: Sequence[Tensor]) -> float:
        """The value, from the states of all ranks."""
        return float(self.value(self.join(list(states))))


def named(name: str, ignored: int) -> Summed:
    """The metric of this name; targets that are `ignored` are left out."""
    match name:
        case "mse" | "rmse" | "mae":
            size = torch.abs if name == "mae" else torch.square
            value = (lambda sums: _mean(sums).sqrt()) if name == "rmse" else _mean
            # of all numbers: maps may have another size in each batch
            return Summed(lambda *halves: _errors(size, *halves).reshape(4, -1).sum(1), value)
        case "r2":
            return Summed(partial(_errors, torch.square), _explained)
        case "perplexity":
            return Summed(partial(_surprise, ignored), lambda sums: _mean(sums).exp())
        case "top5":
            return Summed(partial(_in_top5, ignored), _mean)
        case "auc":
            return Summed(partial(_chances, ignored), _area, torch.cat)
        case "precision" | "recall" | "f1" | "mean_iou":
            return Summed(partial(_counts, ignored), partial(_mean_of_classes, name))
        case _:  # accuracy, of samples, pixels or tokens
            return Summed(partial(_counts, ignored), lambda counts: _mean(counts[::2]))


def mean_of(function: Callable[[Any, Any], Any]) -> Summed:
    """A function (outputs, targets) -> mean over the samples of a batch."""

    def sums(outputs: Any, targets: Any) -> Tensor:
        first = first_tensor(targets)
        num = 1 if first is None or not first.ndim else len(first)
        with side_by_side(outputs, targets):
            value = torch.as_tensor(function(outputs, targets), dtype=torch.float64)
        return torch.stack([value * num, torch.full_like(value, num)])

    return Summed(sums, _mean)


def _mean(sums: Tensor) -> Tensor:
    """Of sums, and over how much they are; NaN of nothing."""
    return sums[0].sum() / sums[1].sum()


# ---- classes -----------------------------------------------------------------------------------


def labelled(
    outputs: Any, targets: Any, ignored: int, find: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, int]:
    """For each target that is a class a row of what `find` makes of scores, and that class; and how
    many classes there are.

    Outputs (N, C, ...), or (N, ..., C) as of text, are scores of C classes; without that dimension,
    or with C = 1, they are logits of the second of two. Targets are (N, ...). `find` gives (N, any
    number, ...).

    Raises TrainingError for shapes that do not fit, and a class that the network does not know.
    """
    _require_tensors(outputs, targets)
    scores = classes_first(outputs, targets).detach()
    if not fits_first(scores, targets):
        if scores.ndim > 1 and scores.shape[1] == 1:
            scores = scores.squeeze(1)
        if targets.ndim > scores.ndim and targets.shape[1] == 1:
            targets = targets.squeeze(1)
        if scores.shape != targets.shape or scores.ndim == 2:
            raise TrainingError(
                f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} are not scores "
                "of classes and classes: a metric of classes needs (N, C, ...) and (N, ...)."
            )
        scores = torch.stack([torch.zeros_like(scores), scores], 1)
    num, found = scores.shape[1], find(scores).movedim(1, -1).flatten(0, -2)
    actual = targets.flatten() if not targets.is_floating_point() else targets.flatten().round()
    counts = actual != ignored
    found, actual = found[counts], actual[counts].long()
    if len(actual) and not 0 <= int(actual.min()) <= int(actual.max()) < num:
        wrong = sorted(set(actual.tolist()) - set(range(num)))[:3]
        raise TrainingError(
            f"the targets have class {', '.join(map(str, wrong))}, the network has {num} outputs: "
            f"classes are 0 to {num - 1}."
        )
    return found, actual, num


def likeliest(scores: Tensor) -> Tensor:
    """The class with the highest score, (N, 1, ...): a `find` of `labelled`."""
    return scores.argmax(1, keepdim=True)


def _counts(ignored: int, outputs: Any, targets: Any) -> Tensor:
    """How often each class is right, predicted and true: (3, classes)."""
    found, actual, num = labelled(outputs, targets, ignored, likeliest)
    predicted = found[:, 0]
    places = (actual[predicted == actual], predicted, actual)
    return torch.stack([one.bincount(minlength=num) for one in places]).double()


def _mean_of_classes(name: str, counts: Tensor) -> Tensor:
    """Of those that occur, as scikit-learn's "macro"."""
    right, predicted, true = counts[:, counts[1:].sum(0) > 0]
    whole = {
        "precision": predicted,
        "recall": true,
        "f1": (predicted + true) / 2,
        "mean_iou": predicted + true - right,
    }[name]
    shares: Tensor = right / whole.clamp(min=1)
    return shares.mean()


def _in_top5(ignored: int, outputs: Any, targets: Any) -> Tensor:
    found, actual, _ = labelled(
        outputs, targets, ignored, lambda scores: scores.topk(min(5, scores.shape[1]), 1).indices
    )
    is_in = (found == actual[:, None]).any(1).double()
    return torch.stack([is_in.sum(), torch.ones_like(is_in).sum()])


def _chances(ignored: int, outputs: Any, targets: Any) -> Tensor:
    """Rows: the probability of each class, and the true one."""
    rows, actual, _ = labelled(outputs, targets, ignored, lambda scores: scores.double().softmax(1))
    return torch.cat([rows, actual[:, None]], 1)


def _area(rows: Tensor) -> Tensor:
    from torchmetrics.functional import classification

    chances, actual, num = rows[:, :-1], rows[:, -1].long(), rows.shape[1] - 1
    if num == 2:
        return classification.binary_auroc(chances[:, 1], actual)
    return classification.multiclass_auroc(chances, actual, num, average="macro")


def _surprise(ignored: int, outputs: Any, targets: Any) -> Tensor:
    """The sum of the cross entropy, and over how many."""
    _require_tensors(outputs, targets)
    outputs = classes_first(outputs, targets).double()
    total = functional.cross_entropy(outputs, targets, ignore_index=ignored, reduction="sum")
    return torch.stack([total, (targets != ignored).sum().double()])


# ---- numbers -----------------------------------------------------------------------------------


def _errors(size: Callable[[Tensor], Tensor], outputs: Any, targets: Any) -> Tensor:
    """Of each number of a sample: sizes of errors, how many, targets, their squares: (4, ...)."""
    _require_tensors(outputs, targets)
    outputs, targets = aligned(outputs.detach().double(), targets)
    errors = size(outputs - targets)
    columns = errors, torch.ones_like(errors), targets, targets.square()
    return torch.stack([column.sum(0) for column in columns])


def _explained(sums: Tensor) -> Tensor:
    """R2: the share of the variance that is explained; its mean over the numbers of a sample."""
    errors, num, total, squares = sums
    explained: Tensor = 1 - errors / (squares - total.square() / num)
    return explained.mean()


def _require_tensors(outputs: Any, targets: Any) -> None:
    for what, value in (("outputs", outputs), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise TrainingError(
                f"the {what} are a {type(value).__name__}, not a tensor: name the output that a "
                "metric is of, metrics={'mask': 'mean_iou'}."
            )
