"""Cross entropy over samples, pixels and classes that weigh differently. Runs on engines.

Knows only torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpupool.core.errors import TrainingError
from gpupool.engine.batches.form import has_part, main_output, part_of

NO_CLASS = -100  # of torch's cross_entropy

# What torchvision's references (segmentation) and the papers (GoogLeNet, Inception) give the loss
# of an auxiliary classifier.
_AUXILIARY = {"aux": 0.5, "aux_logits1": 0.3, "aux_logits2": 0.3, "aux_logits": 0.4}


def require_outputs(outputs: Any, num_classes: int) -> None:
    """Raise TrainingError if outputs (N, C, ...) have fewer classes than the data.

    Only shapes are looked at, which are the same on every rank; on a GPU a target without an output
    would end the process's use of it.
    """
    if isinstance(outputs, Tensor) and outputs.ndim > 1 and outputs.shape[1] < num_classes:
        raise TrainingError(
            f"the network has {outputs.shape[1]} outputs, and the data have {num_classes} classes: "
            f"gpupool.replace_head(model, {num_classes}) gives it as many."
        )


def require_tensor(outputs: Any) -> None:
    """Raise TrainingError if a network gives several outputs, and no loss says which is meant."""
    if not isinstance(outputs, Tensor):
        is_named = isinstance(outputs, Mapping)
        names = list(outputs) if is_named else list(range(len(outputs))) if outputs else [0]
        raise TrainingError(
            f"the network gives a {type(outputs).__name__} with {', '.join(map(repr, names))}: say "
            f"which the loss is of, as loss={{{names[0]!r}: 'cross_entropy'}}, or give a function "
            "(outputs, targets)."
        )


def _beyond(num_outputs: int, targets: Tensor, ignored: int) -> TrainingError:
    """The error for targets without an output, which on a CPU torch finds."""
    is_beyond = (targets != ignored) & ((targets < 0) | (targets >= num_outputs))
    value = int(targets[is_beyond][0])
    if targets.ndim > 1:
        cure = (
            "if that means nothing, classes={...} of the SegmentationDatastore makes all that it "
            f"does not name -100, or give loss=torch.nn.CrossEntropyLoss(ignore_index={value})"
        )
    else:
        cure = "number the classes from 0; gpupool.replace_head gives a network as many outputs"
    return TrainingError(
        f"a target is {value}, and the network has {num_outputs} outputs, for the classes 0 to "
        f"{num_outputs - 1}: {cure}."
    )


def fits_first(outputs: Any, targets: Any) -> bool:
    """Whether outputs (N, C, ...) are scores of classes for targets (N, ...)."""
    return bool(
        outputs.ndim == targets.ndim + 1
        and outputs.shape[1] > 1
        and outputs.shape[:1] + outputs.shape[2:] == targets.shape
    )


def fits_last(outputs: Any, targets: Any) -> bool:
    """Whether outputs (N, ..., C) are, as transformers for text give them: (N, tokens, C)."""
    return bool(outputs.ndim > 2 and outputs.shape[:-1] == targets.shape and outputs.shape[-1] > 1)


def classes_first(outputs: Any, targets: Any) -> Any:
    """Outputs as torch's losses take them: (N, C, ...); as they are where both ways fit."""
    are_tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    if are_tensors and fits_last(outputs, targets) and not fits_first(outputs, targets):
        return outputs.movedim(-1, 1)
    return outputs


@dataclass(frozen=True, eq=False)
class ClassMean:
    """Cross entropy: a mean over samples, or pixels of a class, each as much as its class weighs.

    Of one class a sample without `weight` and with torch's own `ignored`, it is a mean over all
    samples, so that ranks need not ask each other; a sample of no class (-100) adds 0.
    `num_classes`: so many outputs the data need; 0 where nobody knows.
    """

    function: Callable[..., Tensor]
    weight: Tensor | None = None
    ignored: int = NO_CLASS
    label_smoothing: float = 0.0
    num_classes: int = 0

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        if self.num_classes:
            require_outputs(classes_first(main_output(outputs), targets), self.num_classes)
        loss = self._mean(main_output(outputs), targets)
        for name, factor in {} if isinstance(outputs, Tensor) else _AUXILIARY.items():
            if has_part(outputs, name) and part_of(outputs, name) is not None:
                loss = loss + factor * self._mean(part_of(outputs, name), targets)
        return loss

    def num_counted(self, targets: Tensor, num_here: int) -> int | Tensor:
        """Over how much it is a mean, see `Loss`."""
        if self._counts_samples(targets):
            return num_here
        return self._count(targets) * (num_here > 0)

    def _counts_samples(self, targets: Tensor) -> bool:
        if targets.is_floating_point():  # probabilities of the classes
            return True
        return targets.ndim == 1 and self.weight is None and self.ignored == NO_CLASS

    def _count(self, targets: Tensor) -> Tensor:
        counts = targets != self.ignored
        if self.weight is None:
            return counts.sum(dtype=torch.float64)
        # `where`: the class that is ignored is no index of the weights.
        return (self.weight.double()[targets.where(counts, 0)] * counts).sum()

    def _mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        require_tensor(outputs)
        outputs = classes_first(outputs, targets)
        more: dict[str, Any] = {}
        if self.label_smoothing:
            more["label_smoothing"] = self.label_smoothing
        if targets.is_floating_point():
            return self.function(outputs, targets, self.weight, **more)
        # A sum over a count of our own: torch's mean divides by what counts in this share, and is
        # NaN where nothing does.
        more |= {"ignore_index": self.ignored, "reduction": "sum"}
        try:
            total = self.function(outputs, targets, self.weight, **more)
        except IndexError:
            raise _beyond(outputs.shape[1], targets, self.ignored) from None
        if self._counts_samples(targets):
            return total / len(targets)
        count = self._count(targets)
        return total / count.where(count > 0, 1).to(total.dtype)
