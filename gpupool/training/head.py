"""Fit the last layer of a classifier to one's own classes. Runs on the client."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from gpupool.core.errors import TrainingError

if TYPE_CHECKING:
    from torch import nn


def replace_head(model: nn.Module, num_classes: int) -> nn.Module:
    """A copy of `model` whose last layer has `num_classes` outputs and fresh weights.

    The last `nn.Linear` in order of definition is replaced, or the last `nn.Conv2d` where a
    network ends in one (SqueezeNet): right for the classifiers of torchvision. The other
    weights are kept.

    Raises:
        TrainingError: there is no such layer.
    """
    from torch import nn

    require_module(model)
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    linear = [(name, layer) for name, layer in layers if isinstance(layer, nn.Linear)]
    if not layers:
        raise TrainingError(
            f"{type(model).__name__} has no linear or convolution layer to replace; put "
            f"nn.Linear(..., {num_classes}) at its end yourself."
        )
    name, old = (linear or layers)[-1]
    changed = copy.deepcopy(model)
    if not name:  # the network is that layer
        return _like(old, num_classes)
    parent_name, _, attribute = name.rpartition(".")
    setattr(changed.get_submodule(parent_name), attribute, _like(old, num_classes))
    if hasattr(changed, "num_classes"):  # SqueezeNet reads it in its forward
        changed.num_classes = num_classes  # type: ignore[assignment]
    return changed


def require_module(model: object) -> None:
    """Refuse what is not a network, with a sentence."""
    from torch import nn

    if not isinstance(model, nn.Module):
        hint = " Call it: the class itself is not a network." if isinstance(model, type) else ""
        raise TrainingError(f"model is a {type(model).__name__}, not a torch.nn.Module.{hint}")


def _like(old: nn.Module, num_classes: int) -> nn.Module:
    from torch import nn

    if isinstance(old, nn.Linear):
        return nn.Linear(old.in_features, num_classes, bias=old.bias is not None)
    assert isinstance(old, nn.Conv2d)
    return nn.Conv2d(
        old.in_channels,
        num_classes,
        old.kernel_size,  # type: ignore[arg-type]
        stride=old.stride,  # type: ignore[arg-type]
        padding=old.padding,  # type: ignore[arg-type]
        bias=old.bias is not None,
    )
