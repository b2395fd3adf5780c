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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gpupool.core.errors import TrainingError
from gpupool.core.options.named_measures import check_loss, name_of
from gpupool.data.reading.trees import first_tensor, tensors
from gpupool.engine.batches.form import label_of, main_output, part_of
from gpupool.engine.numerics import model_loss
from gpupool.engine.numerics.class_loss import NO_CLASS, ClassMean, classes_first, require_tensor
from gpupool.engine.numerics.model_loss import Counts

Mean = Callable[[Any, Any], Tensor]


def _scored(outputs: Any, targets: Any) -> tuple[Any, Any]:
    label = label_of(targets)  # of a whole batch
    return main_output(outputs), targets if label is None else label


@dataclass(frozen=True)
class Loss:
    """What training needs of a loss.

    `mean` gives the mean over what counts, one number, 0 if nothing does. `num_counted` gives over
    how much, of `targets` and the number of samples that are here: that number itself, or float64
    on the device, from which it is not read. `scored` gives the output and the targets that
    accuracy and metrics without a name of an output mean. `ignored` is the class in targets that
    means none; `is_of_classes`: targets of whole numbers are certainly classes.
    """

    mean: Mean
    num_counted: Counts = model_loss.samples
    scored: Callable[[Any, Any], tuple[Any, Any]] = _scored
    ignored: int = NO_CLASS
    is_of_classes: bool = False

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """The mean over what counts."""
        return self.mean(outputs, targets)


def make_loss(
    loss: Any,
    device: torch.device | str = "cpu",
    *,
    model: nn.Module | None = None,
    weight: Any = None,
    num_classes: int = 0,
) -> Loss:
    """The loss that is meant by a name, a callable, a module, or a dict of these by output.

    A callable is (outputs, targets) -> mean over the samples. If it is a mean over something else,
    give it a method `num_counted(targets, num_here)` as in `Loss`. `nn.CrossEntropyLoss` and
    `nn.NLLLoss` count what torch does: classes' weights, and not `ignore_index`. A dict maps names
    (or numbers) of outputs to a loss, or (loss, weight); targets that are a dict or tuple too are
    taken by the same names. Outputs with auxiliary classifiers ("aux" of torchvision's segmentation
    networks, `aux_logits` of GoogLeNet and Inception) add these, times 0.5, 0.3 or 0.4. None or
    "output" is what `model` gives itself. `weight` says what a function or `model` is a mean over;
    a loss over classes refuses outputs of fewer than `num_classes`.

    Raises TrainingError for what is none, a module that does not give a mean, or one with
    parameters that train; and for a `weight` of a loss that counts itself.
    """
    counts = model_loss.counter(weight, model)
    if loss in ("output", None):
        shifts = model is not None and model_loss.predicts_next(model)
        own = counts or partial(model_loss.tokens_or_samples, shifts=shifts)
        scored = partial(model_loss.scored, shifts=shifts)
        return Loss(model_loss.given_loss, own, scored, is_of_classes=True)
    check_loss(loss)
    is_own = callable(loss) and not type(loss).__module__.startswith("torch.nn.")
    if weight is not None and not is_own:
        raise TrainingError(
            f"weight={weight!r} does nothing with the loss {name_of(loss)!r}, which counts what it "
            "is a mean over itself: leave it out."
        )
    if isinstance(loss, Mapping):
        return _of_outputs(loss, device)
    if isinstance(loss, nn.Module):
        _check_module(loss)
        loss = loss.to(device)
    if isinstance(loss, str) or type(loss) in (*_OF_CLASSES, *_OF_NUMBERS):
        return _known(loss, num_classes)
    own = counts or getattr(loss, "num_counted", None) or model_loss.samples
    return Loss(partial(_one_number, loss), own)


def _nothing(outputs: Any, targets: Any) -> Tensor:
    first = first_tensor(outputs)
    return torch.zeros((), device="cpu" if first is None else first.device)


NO_LOSS = Loss(_nothing, is_of_classes=True)
"""Where only metrics are wanted."""


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


# ---- losses that have a name, and torch's modules ----------------------------------------------


def _nll(outputs: Tensor, targets: Tensor, *more: Any, **settings: Any) -> Tensor:
    return functional.nll_loss(outputs, targets, *more, **settings)


# A class that is derived from one of these may compute another mean.
_OF_CLASSES: dict[Any, Callable[..., Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "nll": _nll,
    nn.CrossEntropyLoss: functional.cross_entropy,
    nn.NLLLoss: _nll,
}
_OF_NUMBERS = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss),
    *(nn.BCELoss, nn.BCEWithLogitsLoss, nn.SoftMarginLoss, nn.HingeEmbeddingLoss),
)
_NAMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": functional.mse_loss,
    "mae": functional.l1_loss,
    "huber": functional.huber_loss,
    "smooth_l1": functional.smooth_l1_loss,
    "bce_with_logits": functional.binary_cross_entropy_with_logits,
}


def _known(loss: Any, num_classes: int) -> Loss:
    function = _OF_CLASSES.get(loss if isinstance(loss, str) else type(loss))
    if function is None:
        return Loss(partial(_aligned_mean, _NAMED[loss] if isinstance(loss, str) else loss))
    mean = ClassMean(
        function,
        getattr(loss, "weight", None),
        int(getattr(loss, "ignore_index", NO_CLASS)),
        float(getattr(loss, "label_smoothing", 0.0)),
        num_classes,
    )
    return Loss(mean, mean.num_counted, _scored_classes, mean.ignored, is_of_classes=True)


def _scored_classes(outputs: Any, targets: Any) -> tuple[Any, Any]:
    return classes_first(main_output(outputs), targets), targets


def _aligned_mean(function: Mean, outputs: Any, targets: Tensor) -> Tensor:
    outputs = main_output(outputs)
    require_tensor(outputs)
    return function(*aligned(outputs, targets))


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


# ---- losses of several outputs -----------------------------------------------------------------


def _of_outputs(losses: Mapping[Any, Any], device: torch.device | str) -> Loss:
    """The weighted sum of losses of several outputs, which are means over the same."""
    parts: list[tuple[Any, Loss, float]] = []
    for name, asked in losses.items():
        loss, weight = asked if isinstance(asked, tuple) else (asked, 1.0)
        parts.append((name, make_loss(loss, device), float(weight)))
    # Accuracy needs classes: of several outputs the first that has a loss over classes.
    first, main, _ = next((part for part in parts if part[1].is_of_classes), parts[0])

    def mean(outputs: Any, targets: Any) -> Tensor:
        terms = [
            weight * loss(part_of(outputs, name), _target(targets, name))
            for name, loss, weight in parts
        ]
        return sum(terms[1:], terms[0])

    def num_counted(targets: Any, num_here: int) -> int | Tensor:
        counts = [loss.num_counted(_target(targets, name), num_here) for name, loss, _ in parts]
        kinds = {(one.ignored, id(getattr(one.mean, "weight", None))) for _, one, _ in parts}
        is_of_one = len(kinds) == 1 and all(one.is_of_classes for _, one, _ in parts)
        is_of_one &= isinstance(targets, Tensor)
        if len(parts) > 1 and not is_of_one and any(isinstance(one, Tensor) for one in counts):
            counted = next(
                part[0] for part, one in zip(parts, counts, strict=True) if isinstance(one, Tensor)
            )
            raise TrainingError(
                f"loss: that of {counted!r} is a mean over pixels, tokens or weights of classes, "
                "and those of a dict must be means over the samples. Give one function (outputs, "
                "targets) -> mean over the samples."
            )
        return counts[0]

    def scored(outputs: Any, targets: Any) -> tuple[Any, Any]:
        return main.scored(part_of(outputs, first), _target(targets, first))

    return Loss(mean, num_counted, scored, main.ignored, main.is_of_classes)


def _target(targets: Any, name: Any) -> Any:
    if isinstance(targets, Tensor):
        return targets
    return part_of(targets, name, "the targets")


# ---- a function of the user's ------------------------------------------------------------------


def _one_number(function: Mean, outputs: Any, targets: Any) -> Tensor:
    with side_by_side(outputs, targets):
        mean = function(outputs, targets)
    if not isinstance(mean, Tensor) or mean.ndim:
        found = f"shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else type(mean)
        raise TrainingError(
            f"the loss {name_of(function)} gave {found}: it must give the mean over the samples as "
            "a tensor of one number."
        )
    return mean


def side_by_side(outputs: Any, targets: Any) -> AbstractContextManager[Any]:
    """Inside, a function of the user's that compares each output with each target is refused."""
    shapes = [{tuple(one.shape) for one in tensors(tree)} for tree in (outputs, targets)]
    for one, other in (shapes, shapes[::-1]):
        for shape in one:
            if len(shape) == 1 and shape[0] > 1 and (*shape, 1) in other:
                return _Paired({shape, (*shape, 1)})
    return nullcontext()


class _Paired(TorchFunctionMode):
    """Raises TrainingError where outputs (N, 1) and targets (N,) would become (N, N) in a loss.

    Each sample would be compared with those that happen to be on its rank.
    """

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self._shapes = shapes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pair = [part for part in args[:2] if isinstance(part, Tensor)]
        is_mixed = {tuple(part.shape) for part in pair} == self._shapes
        if is_mixed and func.__name__.endswith("_loss"):
            self._refuse(*pair)
        found = func(*args, **(kwargs or {}))
        # Others take both as well, and compare nothing: view_as, type_as.
        if is_mixed and getattr(found, "shape", None) == (len(pair[0]),) * 2:
            self._refuse(*pair)
        return found

    def _refuse(self, one: Tensor, other: Tensor) -> None:
        # Of one storage they are a vector and its own column, as losses over pairs have them.
        if one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr():
            return
        raise TrainingError(
            f"the loss takes numbers of the shapes {tuple(one.shape)} and {tuple(other.shape)} "
            "together: each would be compared with each. Give outputs and targets the same shape, "
            "by squeeze(-1) or unsqueeze(-1)."
        )
