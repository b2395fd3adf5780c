"""Losses, and over how much each is a mean. Runs on engines; knows only torch.

Ranks average their losses, each counted as often as what it is a mean over: so it must be known,
from the targets alone, before the loss is.
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
from gpupool.core.options.datasets import NO_CLASS
from gpupool.core.options.named_measures import LOSSES, check_loss, name_of
from gpupool.data.reading.trees import first_tensor, tensors
from gpupool.engine.batches.form import has_part, label_of, main_output, part_of

# A class that is derived from one of these may compute another mean.
_OF_CLASSES: dict[type, Callable[..., Tensor]] = {
    nn.CrossEntropyLoss: functional.cross_entropy,
    nn.NLLLoss: functional.nll_loss,
}
_OF_NUMBERS = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss),
    *(nn.BCELoss, nn.BCEWithLogitsLoss, nn.SoftMarginLoss, nn.HingeEmbeddingLoss),
)


def _scored(outputs: Any, targets: Any) -> tuple[Any, Any]:
    label = label_of(targets)  # of a whole batch
    return main_output(outputs), targets if label is None else label


@dataclass(frozen=True)
class Loss:
    """`mean` gives the mean over what counts, one number, 0 if nothing does. `counts`: see
    `num_counted`. `scored` gives the output and the targets that accuracy and metrics without a
    name of an output mean. `ignored` is the class in targets that means none."""

    mean: Callable[[Any, Any], Tensor]
    counts: Callable[[Any, int], int | Tensor] = lambda targets, num_here: num_here
    scored: Callable[[Any, Any], tuple[Any, Any]] = _scored
    ignored: int = NO_CLASS

    def num_counted(self, targets: Any, num_here: int) -> int | Tensor:
        """Over how much it is a mean, where so many samples are here; 0 of a placeholder. That
        number itself, or a float64 on the device, from which it is not read."""
        return self.counts(targets, num_here) * (num_here > 0)


def _nothing(outputs: Any, targets: Any) -> Tensor:
    first = first_tensor(outputs)
    return torch.zeros((), device="cpu" if first is None else first.device)


NO_LOSS = Loss(_nothing)
"""Where only metrics are wanted."""


def make_loss(
    loss: Any,
    device: torch.device | str = "cpu",
    *,
    model: nn.Module | None = None,
    weight: Any = None,
    num_classes: int = 0,
) -> Loss:
    """The loss that is meant by a name, a callable or a module.

    A callable is (outputs, targets) -> mean over the samples, or over what `weight` says. Losses of
    classes count what torch does: classes' weights, and not `ignore_index`; they refuse outputs of
    fewer than `num_classes`. None or "output" is what `model` gives itself.

    Raises TrainingError for what is none, or no mean over the samples.
    """
    shifts = _predicts_next(model)
    if loss in ("output", None):
        scored = partial(_scores_and_labels, shifts=shifts)
        return Loss(_given_loss, partial(_counted, weight, shifts), scored)
    check_loss(loss)
    if weight is not None and (not callable(loss) or type(loss).__module__.startswith("torch.nn.")):
        raise TrainingError(
            f"weight={weight!r} does nothing with the loss {name_of(loss)!r}, which counts what it "
            "is a mean over itself: leave it out."
        )
    if isinstance(loss, str):
        loss = getattr(nn, LOSSES[loss])()
    if isinstance(loss, nn.Module):
        _check_module(loss)
        loss = loss.to(device)
    if type(loss) in _OF_CLASSES:
        mean = _ClassMean(loss, num_classes)
        return Loss(mean, mean.num_counted, mean.scored, mean.ignored)
    if type(loss) in _OF_NUMBERS:
        return Loss(lambda outputs, targets: loss(*aligned(only_output(outputs), targets)))
    return Loss(partial(_one_number, loss), partial(_counted, weight or "samples", shifts))


# ---- outputs and targets that fit ---------------------------------------------------------------


def fits_first(outputs: Any, targets: Any) -> bool:
    """Whether outputs (N, C, ...) are scores of classes for targets (N, ...)."""
    return bool(
        outputs.ndim == targets.ndim + 1
        and outputs.shape[1] > 1
        and outputs.shape[:1] + outputs.shape[2:] == targets.shape
    )


def classes_first(outputs: Any, targets: Any) -> Any:
    """Outputs as torch's losses take them, (N, C, ...), of a transformer's (N, tokens, C) for
    targets (N, tokens); where both ways fit, as they are."""
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.ndim > 2:
        fits_last = outputs.shape[:-1] == targets.shape and outputs.shape[-1] > 1
        if fits_last and not fits_first(outputs, targets):
            return outputs.movedim(-1, 1)
    return outputs


def require_outputs(outputs: Any, num_classes: int) -> None:
    """Raises TrainingError, by the shapes alone: on a GPU a target without an output would end the
    process's use of it."""
    if isinstance(outputs, Tensor) and outputs.ndim > 1 and outputs.shape[1] < num_classes:
        raise TrainingError(
            f"the network has {outputs.shape[1]} outputs, and the data have {num_classes} classes: "
            f"gpupool.replace_head(model, {num_classes}) gives it as many."
        )


def only_output(outputs: Any) -> Tensor:
    """The main output; TrainingError of several, where nobody says which is meant."""
    outputs = main_output(outputs)
    if not isinstance(outputs, Tensor):
        raise TrainingError(
            f"there is a {type(outputs).__name__} where one tensor is needed: give a loss function "
            "(outputs, targets) -> mean that takes a part of it, and name the part that a metric "
            "is of, metrics={'mask': 'mean_iou'}."
        )
    return outputs


def aligned(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets as numbers of the same shape, where one may have a last dimension of 1.
    Others are refused: torch would compare each with each."""
    if outputs.shape == (*targets.shape, 1):
        outputs = outputs.squeeze(-1)
    elif targets.shape == (*outputs.shape, 1):
        targets = targets.squeeze(-1)
    if outputs.shape != targets.shape:
        shapes = [" x ".join(map(str, one.shape)) or "one number" for one in (outputs, targets)]
        raise TrainingError(
            f"the network gives {shapes[0]}, the targets are {shapes[1]}: they must have the same "
            "shape."
        )
    return outputs, targets.to(outputs.dtype)


# ---- torch's modules ----------------------------------------------------------------------------


def _check_module(loss: nn.Module) -> None:
    name, reduction = type(loss).__name__, getattr(loss, "reduction", "mean")
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


class _ClassMean:
    """Cross entropy: a mean over samples, or pixels of a class, each as much as its class weighs.

    Of one class a sample without weights and with torch's own `ignored`, it is a mean over all
    samples, so that ranks need not ask each other; a sample of no class (-100) adds 0.
    """

    def __init__(self, loss: nn.Module, num_classes: int) -> None:
        self._function, self._num_classes = _OF_CLASSES[type(loss)], num_classes
        self.weight: Any = loss.weight
        self.ignored = int(loss.ignore_index)  # type: ignore[arg-type]
        smoothing = getattr(loss, "label_smoothing", 0.0)
        self._settings = {"label_smoothing": smoothing} if smoothing else {}

    def num_counted(self, targets: Tensor, num_here: int) -> int | Tensor:
        if targets.is_floating_point():  # probabilities of the classes
            return num_here
        if targets.ndim == 1 and self.weight is None and self.ignored == NO_CLASS:
            return num_here
        counts = targets != self.ignored
        if self.weight is not None:
            # `where`: the class that is ignored is no index of the weights.
            counts = self.weight.double()[targets.where(counts, 0)] * counts
        return counts.sum(dtype=torch.float64)

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        outputs = classes_first(only_output(outputs), targets)
        require_outputs(outputs, self._num_classes)
        if targets.is_floating_point():
            return self._function(outputs, targets, self.weight, **self._settings)
        # A sum over a count of our own: torch's mean divides by what counts in this share, and is
        # NaN where nothing does.
        settings = {"ignore_index": self.ignored, "reduction": "sum", **self._settings}
        try:
            total = self._function(outputs, targets, self.weight, **settings)
        except IndexError as error:  # on a CPU
            raise TrainingError(
                f"{error} The network has {outputs.shape[1]} outputs: number the classes from 0; "
                "gpupool.replace_head gives a network as many outputs. For pixels that mean "
                "nothing classes={...} of the SegmentationDatastore makes all that it does not "
                "name -100, or give loss=torch.nn.CrossEntropyLoss(ignore_index=...)."
            ) from None
        count = self.num_counted(targets, len(targets))
        return total / (count if isinstance(count, int) else count.where(count > 0, 1).to(total))

    def scored(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        return classes_first(main_output(outputs), targets), targets


# ---- a function of the user's ------------------------------------------------------------------


def _one_number(function: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> Tensor:
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
    """Inside, a function of the user's that makes (N, N) of outputs (N, 1) and targets (N,), or the
    reverse, is refused: it compares each sample with those that happen to be on its rank."""
    shapes = {tuple(one.shape) for one in tensors([outputs, targets])}
    pairs = [{shape, (*shape, 1)} for shape in shapes if len(shape) == 1 and shape[0] > 1]
    return next((_Paired(pair) for pair in pairs if pair <= shapes), nullcontext())


class _Paired(TorchFunctionMode):
    """Raises TrainingError where tensors of these two shapes become one of each with each."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self._shapes = shapes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pair = [part for part in args[:2] if isinstance(part, Tensor)]
        is_mixed = {tuple(part.shape) for part in pair} == self._shapes
        # Of one storage they are a vector and its own column, as losses over pairs have them.
        is_mixed = is_mixed and len({part.untyped_storage().data_ptr() for part in pair}) == 2
        is_loss = is_mixed and func.__name__.endswith("_loss")
        found = None if is_loss else func(*args, **(kwargs or {}))
        # Others take both as well, and compare nothing: view_as, type_as.
        if is_loss or (is_mixed and getattr(found, "shape", None) == (len(pair[0]),) * 2):
            raise TrainingError(
                f"the loss takes numbers of the shapes {tuple(pair[0].shape)} and "
                f"{tuple(pair[1].shape)} together: each would be compared with each. Give outputs "
                "and targets the same shape, by squeeze(-1) or unsqueeze(-1)."
            )
        return found


def _counted(weight: Any, shifts: bool, targets: Any, num_here: int) -> int | Tensor:
    """What `TrainingOptions.weight` counts; None: labels of tokens where there are, else samples.
    `shifts`: the loss leaves the first label of each sample out."""
    if weight == "samples":
        return num_here
    if callable(weight):
        number, first = weight(targets), first_tensor(targets)
        device = getattr(number if isinstance(number, Tensor) else first, "device", None)
        found = torch.as_tensor(number, dtype=torch.float64, device=device)
        if found.ndim:
            raise TrainingError(f"weight= gave shape {tuple(found.shape)}, not one number.")
        return found
    must_be = weight == "tokens"
    labels = targets if isinstance(targets, Tensor) and must_be else label_of(targets)
    is_tensor = isinstance(labels, Tensor)
    if is_tensor and (must_be or (labels.ndim == 2 and not labels.is_floating_point())):
        return (labels[:, 1:] if shifts else labels).ne(NO_CLASS).sum(dtype=torch.float64)
    if must_be:
        raise TrainingError(
            "weight='tokens' counts labels that are not -100, and the batch has no tensor of "
            "labels: give a function that counts, weight=lambda batch: ..."
        )
    return num_here


# ---- a loss that the network gives -------------------------------------------------------------


def _given_loss(outputs: Any, batch: Any) -> Tensor:
    """A number; what is called "loss"; of several numbers by name, as detection has, their sum."""
    if has_part(outputs, "loss"):
        mean: Tensor = part_of(outputs, "loss").mean()
        return mean
    is_named, parts = isinstance(outputs, Mapping), [outputs]
    if isinstance(outputs, (Mapping, tuple)):
        parts = list(outputs.values() if isinstance(outputs, Mapping) else outputs)
    numbers = [part for part in parts if isinstance(part, Tensor) and not part.ndim]
    if is_named and numbers and len(numbers) == len(parts):
        return torch.stack(numbers).sum()
    # Of a tuple, (loss, logits) or (logits, loss), it is the first part, or the only number.
    if not is_named and numbers and (len(numbers) == 1 or numbers[0] is parts[0]):
        return numbers[0]
    names = f" of {', '.join(map(repr, outputs))}" if is_named else ""
    raise TrainingError(
        f"the network gave no loss, only a {type(outputs).__name__}{names}: networks of Hugging "
        "Face do if the batch has labels (for a language model, collate=transformers."
        "DataCollatorForLanguageModeling(tokenizer, mlm=False) makes them). Or give a loss: "
        "train(model, data, loss)."
    )


def _scores_and_labels(outputs: Any, batch: Any, *, shifts: bool) -> tuple[Any, Any]:
    """Scores of classes and labels; `shifts`: each token is to predict the next one."""
    scores, labels = main_output(outputs), label_of(batch)
    are_tokens = isinstance(scores, Tensor) and isinstance(labels, Tensor) and scores.ndim == 3
    if are_tokens and labels.shape == scores.shape[:2]:
        scores = scores.movedim(-1, 1)
        return (scores[:, :, :-1], labels[:, 1:]) if shifts else (scores, labels)
    return scores, labels


def _predicts_next(model: nn.Module | None) -> bool:
    """Whether a network of Hugging Face is a causal language model: its loss shifts the labels."""
    inner = getattr(model, "get_base_model", None)
    model = inner() if callable(inner) else model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    is_named_so = type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))
    return getattr(model, "loss_type", None) == "ForCausalLM" or (
        hasattr(model, "loss_type") and is_named_so
    )
