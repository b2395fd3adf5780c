"""The metrics that have a name. Runs on engines.

Accuracy is the mean of what is right. All others are torchmetrics', which is imported when one of
them sees its first batch: that takes seconds. Only then is known how many classes there are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpupool.core.errors import TrainingError
from gpupool.engine.metrics.states import MeanOf, OfTorchmetrics
from gpupool.engine.numerics.losses import aligned, classes_first, fits_first, only_output

_ACCURACIES = ("accuracy", "pixel_accuracy", "token_accuracy")  # of samples, pixels, tokens
_OF_NUMBERS = ("mse", "rmse", "mae", "r2")
_OF_SCORES = ("top5", "auc", "perplexity")  # others need the likeliest class alone


def named(
    name: str, pick: Callable[[Any, Any], tuple[Any, Any]], ignored: int
) -> MeanOf | OfTorchmetrics:
    """The metric of this name of what `pick` chooses; targets that are `ignored` are left out."""

    def right(outputs: Any, targets: Any) -> tuple[Tensor, int]:
        found, actual, _ = labelled(*pick(outputs, targets), ignored, likeliest)
        return (found[:, 0] == actual).sum(), len(actual)

    def rows(outputs: Any, targets: Any) -> tuple[Tensor, Tensor, int] | None:
        outputs, targets = pick(outputs, targets)
        if name in _OF_NUMBERS:
            pair = aligned(only_output(outputs).detach().double(), targets)
            by_number = int(name == "r2" and pair[0].ndim > 1)  # its mean over those of a sample
            return pair[0].flatten(by_number), pair[1].flatten(by_number), 0
        find = (lambda scores: scores) if name in _OF_SCORES else likeliest
        found, actual, num = labelled(outputs, targets, ignored, find)
        if name == "auc":
            found = found.double().softmax(1)
        elif name == "perplexity":
            found, actual = found.double()[None], actual[None]
        one_each = name not in _OF_SCORES or (name == "auc" and num == 2)
        return (found[:, -1] if one_each else found, actual, num) if actual.numel() else None

    return MeanOf(right) if name in _ACCURACIES else OfTorchmetrics(partial(_made, name), rows)


def _made(name: str, num: int) -> Any:
    """The metric of torchmetrics, for `num` classes; means of these are over those that occur."""
    from torchmetrics import classification, regression, text

    classes: dict[str, Any] = {"num_classes": num, "validate_args": False}  # `labelled` has looked
    makes: dict[str, Callable[..., Any]] = {
        "top5": partial(classification.MulticlassAccuracy, top_k=min(5, num), average="micro"),
        "precision": classification.MulticlassPrecision,
        "recall": classification.MulticlassRecall,
        "f1": classification.MulticlassF1Score,
        "mean_iou": classification.MulticlassJaccardIndex,
        "auc": classification.MulticlassAUROC,
        "perplexity": text.Perplexity,
        "mse": regression.MeanSquaredError,
        "rmse": partial(regression.MeanSquaredError, squared=False),
        "mae": regression.MeanAbsoluteError,
        "r2": regression.R2Score,
    }
    if name == "auc" and num == 2:
        return classification.BinaryAUROC()
    settings = {} if name in (*_OF_NUMBERS, "perplexity") else classes
    return makes[name](**settings).set_dtype(torch.float64)


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
    scores, targets = classes_first(only_output(outputs), targets).detach(), only_output(targets)
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
    counts = targets.flatten() != ignored
    found, actual = found[counts], targets.flatten()[counts].round().long()
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
