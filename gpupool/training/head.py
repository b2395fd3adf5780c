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

    The last `nn.Linear` in order of definition is replaced, or the last `nn.Conv2d` where a network
    ends in one (SqueezeNet, segmentation), and likewise in auxiliary classifiers, if they have as
    many outputs: right for the classifiers and segmentation networks of torchvision. A network of
    timm replaces its own (`reset_classifier`). The other weights are kept.

    With `learn_rate_factors={"fc.weight": 10, "fc.bias": 20}` the new layer learns faster than the
    others, and with `{"*": 0, "fc.*": 1}` it learns alone.

    Raises:
        TrainingError: there is no such layer.
    """
    require_module(model)
    if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 1:
        raise TrainingError(f"num_classes={num_classes!r}: must be a whole number above 0.")
    # First of all: replacing layers of the caller's network would change it.
    changed: Any = copy_of(model)
    # The names of the outputs go with them; how inputs are normalized stays.
    give(changed, replace(info_of(model), classes=()))
    # timm knows which of its layers is the head; a guess by order would be worse.
    if callable(getattr(changed, "reset_classifier", None)):
        changed.reset_classifier(num_classes)
        return changed  # type: ignore[no-any-return]
    found = _heads(changed)
    if not found:
        raise TrainingError(
            f"{type(model).__name__} has no linear or convolution layer to replace; put "
            f"nn.Linear(..., {num_classes}) at its end yourself."
        )
    for name, old in found:
        if not name:  # the network is that layer
            return _like(old, num_classes)  # type: ignore[return-value]
        # `setattr` on the parent, as a module cannot be replaced through `named_modules`.
        parent, _, attribute = name.rpartition(".")
        setattr(changed.get_submodule(parent), attribute, _like(old, num_classes))
    if hasattr(changed, "num_classes"):  # SqueezeNet reads it in its forward
        changed.num_classes = num_classes
    return changed  # type: ignore[no-any-return]


def require_module(model: object) -> None:
    """Refuse what is not a network, with a sentence."""
    from torch import nn

    if not isinstance(model, nn.Module):
        hint = " Call it: the class itself is not a network." if isinstance(model, type) else ""
        raise TrainingError(f"model is a {type(model).__name__}, not a torch.nn.Module.{hint}")


def _heads(model: Any) -> list[tuple[str, Any]]:
    """The last layer, by name, and those of auxiliary classifiers with as many outputs."""
    from torch import nn

    # A segmentation network ends in its `classifier`, whatever comes after it by name.
    other = "backbone." if hasattr(model, "backbone") and hasattr(model, "classifier") else None
    parts: dict[str, list[tuple[str, Any]]] = {"": []}
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and not (other and name.startswith(other)):
            part = next((one for one in name.split(".") if one in _BESIDE), "")
            parts.setdefault(part, []).append((name, layer))
    # A convolution is the head only where there is no linear layer at all (SqueezeNet).
    linear = ([one for one in layers if isinstance(one[1], nn.Linear)] for layers in parts.values())
    heads = [(some or layers)[-1:] for some, layers in zip(linear, parts.values(), strict=True)]
    # Another number of outputs means another purpose: such a layer is no second classifier.
    num = {_num_outputs(layer) for _, layer in heads[0]}
    return [one for head in heads for one in head if _num_outputs(one[1]) in num]


def _num_outputs(layer: Any) -> int:
    return int(layer.out_features if hasattr(layer, "out_features") else layer.out_channels)


def _like(old: Any, num_classes: int) -> nn.Module:
    from torch import nn

    # Else the new layer of a half-precision network, or of one on a GPU, would not fit the rest.
    where = {"device": old.weight.device, "dtype": old.weight.dtype}
    has_bias = old.bias is not None
    if isinstance(old, nn.Linear):
        return nn.Linear(old.in_features, num_classes, bias=has_bias, **where)
    size = {"stride": old.stride, "padding": old.padding, "dilation": old.dilation}
    return nn.Conv2d(old.in_channels, num_classes, old.kernel_size, bias=has_bias, **size, **where)
