"""Losses, and over how much each is a mean. Runs on engines; knows only torch.

Ranks average their losses, each counted as often as what it is a mean over: so it must be known,
from the targets alone, before the loss is.

    loss = make_loss("cross_entropy")
    mean_loss = loss(outputs, targets)             # over this rank's share
    counted = loss.num_counted(targets, num_here)  # its samples; of masks, pixels that have a class
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gpupool.core.errors import TrainingError
from gpupool.core.options.named_measures import check_loss, name_of
from gpupool.data.reading.trees import first_tensor
from gpupool.engine.batches.form import label_of
from gpupool.engine.batches.trees import main_output, part_of
from gpupool.engine.numerics.class_loss import NO_CLASS, ClassLoss, require_tensor
from gpupool.engine.numerics.model_loss import ModelLoss, counter, model_loss

LossFunction = Callable[[Any, Any], Tensor]


@runtime_checkable
class Loss(Protocol):
    """What training needs of a loss.

    One of several outputs may have `num_terms` above 1: its terms are means over different things,
    say pixels and samples. It then gives a vector of them, and `num_counted` one too, or an int
    that holds for all; each term times what it counts, summed, is what is minimized.
    """

    @property
    def num_terms(self) -> int:
        """How many means `__call__` gives."""

    @property
    def ignored(self) -> int:
        """The class in targets that means none."""

    @property
    def is_of_classes(self) -> bool:
        """Whether targets of whole numbers are certainly classes, and outputs their scores."""

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The mean over what counts, shape () or (num_terms,); 0 if nothing does."""

    def num_counted(self, targets: Any, num_here: int) -> int | Tensor:
        """Over how much that is a mean: `num_here` if it is the samples that are here.

        Otherwise float64 on the device, shape () or (num_terms,), from which it is not read.
        """

    def scored(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """The output and the targets that accuracy and metrics without a name of an output mean."""


def make_loss(
    loss: Any,
    device: torch.device | str = "cpu",
    *,
    model: nn.Module | None = None,
    weight: Any = None,
) -> Loss:
    """The loss that is meant by a name, a callable, a module, or a dict of these by output.

    A callable is (outputs, targets) -> mean over the samples. If it is a mean over something else,
    give it a method `num_counted(targets, num_here)` as in `Loss`. `nn.CrossEntropyLoss` and
    `nn.NLLLoss` count what torch does: classes' weights, and not `ignore_index`. A dict maps names
    (or numbers) of outputs to a loss, or (loss, weight); targets that are a dict or tuple too are
    taken by the same names. Outputs with auxiliary classifiers ("aux" of torchvision's segmentation
    networks, `aux_logits` of GoogLeNet and Inception) add these, times 0.5, 0.3 or 0.4. None or
    "output" is what `model` gives itself. `weight` says what a function or `model` is a mean over.

    Raises TrainingError for what is none, a module that does not give a mean, or one with
    parameters that train; and for a `weight` of a loss that counts itself.
    """
    if isinstance(loss, (_Counted, ClassLoss, _OfOutputs)):  # made before
        return loss
    counts = counter(weight, model)
    if loss in ("output", None):
        return ModelLoss(counts) if model is None else model_loss(model, counts)
    check_loss(loss)
    if weight is not None and not _is_own(loss):
        raise TrainingError(
            f"weight={weight!r} does nothing with the loss {name_of(loss)!r}, which counts what it "
            "is a mean over itself: leave it out."
        )
    if isinstance(loss, str):
        return _NAMED[loss]
    if isinstance(loss, Mapping):
        return _of_outputs(loss, device)
    if isinstance(loss, nn.Module):
        _check_module(loss)
        loss = loss.to(device)
        # The class itself: one that is derived from it may compute another mean.
        if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):
            return ClassLoss(
                functional.cross_entropy if type(loss) is nn.CrossEntropyLoss else _nll,
                getattr(loss, "weight", None),
                int(loss.ignore_index),
                float(getattr(loss, "label_smoothing", 0.0)),
            )
        if type(loss) in _ELEMENTWISE:
            return _elementwise(loss)
    return _Counted(loss, counts or getattr(loss, "num_counted", None))


def _is_own(loss: Any) -> bool:
    """A function or module of the user's, which nobody knows."""
    return callable(loss) and not type(loss).__module__.startswith("torch.nn.")


def requiring(loss: Loss, num_classes: int) -> Loss:
    """The same loss; one over classes refuses outputs of fewer."""
    return replace(loss, num_classes=num_classes) if isinstance(loss, ClassLoss) else loss


@dataclass(frozen=True)
class _Counted:
    """A function that is a mean over the samples, or what its `counts` says."""

    function: LossFunction
    counts: Callable[[Any, int], int | Tensor] | None = None
    num_terms: int = 1
    ignored: int = NO_CLASS
    is_of_classes: bool = False

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        with _pairing(outputs, targets):
            mean = self.function(outputs, targets)
        if not isinstance(mean, Tensor) or mean.ndim:
            found = f"shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else type(mean)
            raise TrainingError(
                f"the loss {name_of(self.function)} gave {found}: it must give the mean over the "
                "samples as a tensor of one number."
            )
        return mean

    def num_counted(self, targets: Any, num_here: int) -> int | Tensor:
        return num_here if self.counts is None else self.counts(targets, num_here)

    def scored(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        label = label_of(targets)  # of a whole batch
        return main_output(outputs), targets if label is None else label


@dataclass(frozen=True)
class _None:
    """No loss, where only metrics are wanted."""

    num_terms: int = 0
    ignored: int = NO_CLASS
    is_of_classes: bool = True

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        first = first_tensor(outputs)
        return torch.zeros(0, device="cpu" if first is None else first.device)

    def num_counted(self, targets: Any, num_here: int) -> int | Tensor:
        return num_here

    def scored(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        label = label_of(targets)
        return main_output(outputs), targets if label is None else label


NO_LOSS: Loss = _None()


@dataclass(frozen=True)
class _OfOutputs:
    """The weighted sum of losses of several outputs; each a term, if not all count samples."""

    parts: tuple[tuple[Any, Loss, float], ...]
    num_terms: int
    ignored: int

    @property
    def is_of_classes(self) -> bool:
        return any(isinstance(loss, ClassLoss) for _, loss, _ in self.parts)

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        terms = [
            weight * loss(part_of(outputs, name), _target(targets, name))
            for name, loss, weight in self.parts
        ]
        return torch.stack(terms) if self.num_terms > 1 else sum(terms[1:], terms[0])

    def num_counted(self, targets: Any, num_here: int) -> int | Tensor:
        counts = [
            loss.num_counted(_target(targets, name), num_here) for name, loss, _ in self.parts
        ]
        if all(isinstance(count, int) for count in counts):  # nothing to sum over the ranks
            return num_here
        device = next(count.device for count in counts if isinstance(count, Tensor))
        return torch.stack([torch.as_tensor(c, dtype=torch.float64, device=device) for c in counts])

    def scored(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        # Accuracy needs classes: of several outputs the first that has a loss over classes.
        name = next((n for n, loss, _ in self.parts if isinstance(loss, ClassLoss)), None)
        if name is None:
            name = self.parts[0][0]
        return main_output(part_of(outputs, name)), _target(targets, name)


class _Paired(TorchFunctionMode):
    """Raises TrainingError where outputs (N, 1) and targets (N,) would become (N, N) in a loss.

    Each sample would be compared with those that happen to be on its rank.
    """

    def __init__(self, outputs: Any, targets: Any) -> None:
        super().__init__()
        self._shapes = {
            tuple(part.shape) for part in (outputs, targets) if isinstance(part, Tensor)
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pair = [part for part in args[:2] if isinstance(part, Tensor)]
        if len(pair) == 2 and {tuple(part.shape) for part in pair} == self._shapes:
            one, other = pair
            # Of one storage they are a vector and its own column, as losses over pairs have them.
            if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
                raise TrainingError(
                    f"the loss takes numbers of the shapes {tuple(one.shape)} and "
                    f"{tuple(other.shape)} together: each would be compared with each. Give "
                    "outputs and targets the same shape, by squeeze(-1) or unsqueeze(-1)."
                )
        return func(*args, **(kwargs or {}))


def _pairing(outputs: Any, targets: Any) -> AbstractContextManager[Any]:
    """`_Paired` for outputs and targets that may become one by mistake."""
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and len(targets) > 1:
        shapes = sorted((tuple(outputs.shape), tuple(targets.shape)), key=len)
        if len(shapes[0]) == 1 and shapes[1] == (*shapes[0], 1):
            return _Paired(outputs, targets)
    return nullcontext()


def require_gradient(mean_loss: Tensor) -> None:
    """Raise TrainingError for a loss from which no gradient goes back into the network."""
    if not mean_loss.requires_grad:
        raise TrainingError(
            "the loss has no gradient: it does not depend on the network's outputs, or was cut off "
            "from them by .detach(), .item(), .numpy(), argmax, torch.tensor() or torch.no_grad(). "
            "Compute it from the outputs by functions of torch."
        )


def add_gradient(loss: Tensor) -> None:
    """`loss.backward()`; TrainingError where the loss mixes numbers of two precisions."""
    try:
        loss.backward()
    except RuntimeError as error:
        if not str(error).startswith("Found dtype"):
            raise
        raise TrainingError(
            f"the loss mixes numbers of two precisions ({error}): targets made of Python floats "
            "are float64, the outputs are not. Take targets.float() in the loss, or give float32 "
            "in the data set."
        ) from None


def aligned(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets as numbers of the same shape; outputs may have a last dimension of 1.

    Raises TrainingError if they differ otherwise: torch would compare each with each.
    """
    if outputs.shape != targets.shape:
        if outputs.shape == (*targets.shape, 1):
            outputs = outputs.squeeze(-1)
        elif targets.shape == (*outputs.shape, 1):
            targets = targets.squeeze(-1)
        else:
            raise TrainingError(
                f"the network gives {_shape(outputs)}, the targets are {_shape(targets)}: they "
                "must have the same shape."
            )
    return outputs, targets.to(outputs.dtype)


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "one number"


def _elementwise(function: Callable[[Tensor, Tensor], Tensor]) -> _Counted:
    def mean(outputs: Any, targets: Tensor) -> Tensor:
        outputs = main_output(outputs)
        require_tensor(outputs)
        return function(*aligned(outputs, targets))

    mean.__name__ = name_of(function)
    return _Counted(mean)


def _nll(outputs: Tensor, targets: Tensor, *more: Any, **settings: Any) -> Tensor:
    return functional.nll_loss(outputs, targets, *more, **settings)


# Of torch's modules those over numbers that stand side by side.
_ELEMENTWISE = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss),
    *(nn.BCELoss, nn.BCEWithLogitsLoss, nn.SoftMarginLoss, nn.HingeEmbeddingLoss),
)
_NAMED: dict[str, Loss] = {
    "cross_entropy": ClassLoss(functional.cross_entropy),
    "nll": ClassLoss(_nll),
    "mse": _elementwise(functional.mse_loss),
    "mae": _elementwise(functional.l1_loss),
    "huber": _elementwise(functional.huber_loss),
    "smooth_l1": _elementwise(functional.smooth_l1_loss),
    "bce_with_logits": _elementwise(functional.binary_cross_entropy_with_logits),
}


def _of_outputs(losses: Mapping[Any, Any], device: torch.device | str) -> Loss:
    parts = []
    for name, asked in losses.items():
        loss, weight = asked if isinstance(asked, tuple) else (asked, 1.0)
        parts.append((name, make_loss(loss, device), float(weight)))
    if any(loss.num_terms > 1 for _, loss, _ in parts):
        raise TrainingError("loss: a dict of losses in a dict of losses; give one, of all outputs.")
    counts_samples = all(isinstance(p, _Counted) and p.counts is None for _, p, _ in parts)
    ignored = next((p.ignored for _, p, _ in parts if isinstance(p, ClassLoss)), NO_CLASS)
    return _OfOutputs(tuple(parts), 1 if counts_samples else len(parts), ignored)


def _target(targets: Any, name: Any) -> Any:
    if isinstance(targets, Tensor):
        return targets
    return part_of(targets, name, "the targets")


def _check_module(loss: nn.Module) -> None:
    name = type(loss).__name__
    reduction = getattr(loss, "reduction", "mean")
    if type(loss).__module__.startswith("torch.nn.") and reduction not in ("mean", "batchmean"):
        raise TrainingError(
            f"loss={name}(reduction={reduction!r}) is no mean over the samples, which training "
            "on several ranks needs: leave reduction out."
        )
    trains = [key for key, parameter in loss.named_parameters() if parameter.requires_grad]
    if trains:
        raise TrainingError(
            f"loss={name} has parameters of its own that would not be trained ({trains[0]}): make "
            "them a part of the model, and give a loss that takes them from its outputs."
        )
