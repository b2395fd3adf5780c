"""Fit the last layer of a network to one's own classes. Runs on the client."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from gpupool.core.errors import TrainingError
from gpupool.core.network import give, info_of
from gpupool.core.wire.pickles import copy_of

if TYPE_CHECKING:
    from torch import nn

Module = TypeVar("Module", bound="nn.Module")

# Parts of torchvision's networks that have a classifier of their own beside the last: GoogLeNet,
# Inception, the segmentation networks; and LR-ASPP, which adds two.
_BESIDE = {"aux1", "aux2", "AuxLogits", "aux_classifier", "low_classifier"}


def replace_head(model: Module, num_classes: int) -> Module:
    """A copy of `model` whose last layer has `num_classes` outputs and fresh weights.

    The last `nn.Linear` is replaced, or the last `nn.Conv2d` where there is none, and likewise in
    auxiliary classifiers; a network of timm replaces its own. The other weights are kept.

    With `learn_rate_factors={"fc.weight": 10, "fc.bias": 20}` the new layer learns faster than the
    others, and with `{"*": 0, "fc.*": 1}` it learns alone. Raises TrainingError without a layer.
    """
    require_module(model)
    if not isinstance(num_classes, int) or num_classes < 1:
        raise TrainingError(f"num_classes={num_classes!r}: must be a whole number above 0.")
    changed: Any = copy_of(model)
    # The names of the outputs go with them; how inputs are normalized stays.
    give(changed, replace(info_of(model), classes=()))
    # timm knows which of its layers is the head; a guess by order would be worse.
    if callable(getattr(changed, "reset_classifier", None)):
        changed.reset_classifier(num_classes)
        return changed  # type: ignore[no-any-return]
    for layer in _heads(changed):
        _renew(layer, num_classes)
    if hasattr(changed, "num_classes"):  # SqueezeNet reads it in its forward
        changed.num_classes = num_classes
    return changed  # type: ignore[no-any-return]


def require_module(model: object) -> None:
    from torch import nn

    if not isinstance(model, nn.Module):
        hint = " Call it: the class itself is not a network." if isinstance(model, type) else ""
        raise TrainingError(f"model is a {type(model).__name__}, not a torch.nn.Module.{hint}")


def _heads(model: Any) -> list[Any]:
    """The last layer, and those of auxiliary classifiers with as many outputs."""
    from torch import nn

    layers = {n: one for n, one in model.named_modules() if isinstance(one, (nn.Linear, nn.Conv2d))}
    if hasattr(model, "backbone") and hasattr(model, "classifier"):
        # A segmentation network ends in its `classifier`, whatever comes after it by name.
        layers = {n: one for n, one in layers.items() if not n.startswith("backbone.")}
    main = [n for n in layers if _BESIDE.isdisjoint(n.split("."))]
    # A convolution is the head only where there is no linear layer at all (SqueezeNet).
    names = [n for n in main if isinstance(layers[n], nn.Linear)] or main
    if not names:
        raise TrainingError(f"{type(model).__name__} has no linear layer, or convolution.")
    head = layers[names[-1]]
    beside = [one for n, one in layers.items() if n not in main and type(one) is type(head)]
    return [head, *(one for one in beside if len(one.weight) == len(head.weight))]


def _renew(layer: Any, num_classes: int) -> None:
    """Give a layer so many outputs, and the weights of a new one, on the same device."""
    from torch import nn

    setattr(layer, "out_features" if isinstance(layer, nn.Linear) else "out_channels", num_classes)
    for name, old in list(layer.named_parameters(recurse=False)):
        setattr(layer, name, nn.Parameter(old.new_empty(num_classes, *old.shape[1:])))
    layer.reset_parameters()
