"""The losses that have a name, and over how much each is a mean. Runs on engines; knows only torch.

Ranks average their losses, each counted as often as what it is a mean over: so it must be known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpupool.engine.batches import Share

LossFunction = Callable[[Any, Tensor], Tensor]

_NO_CLASS = -100  # of torch's cross_entropy


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over all samples, or all pixels of a class: those that are -100 are left out.

    0 where no pixel has a class, so that nothing is learnt from them; torch's own is NaN there.
    """
    if not _is_map(targets):
        return functional.cross_entropy(outputs, targets)
    total = functional.cross_entropy(outputs, targets, reduction="sum")
    return total / (targets != _NO_CLASS).sum().clamp(min=1)


LOSSES: dict[str, LossFunction] = {"cross_entropy": cross_entropy, "mse": functional.mse_loss}


def num_counted(loss: LossFunction, share: Share) -> int | Tensor:
    """Over how much the loss of a share is a mean: its samples, or its pixels that have a class.

    The latter for masks with "cross_entropy": float64 on the device, from which it is not read.
    """
    if loss is not cross_entropy or not _is_map(share.targets):
        return share.num_here
    if not share.num_here:
        return torch.zeros((), dtype=torch.float64, device=share.targets.device)
    return (share.targets != _NO_CLASS).sum(dtype=torch.float64)


def _is_map(targets: Tensor) -> bool:
    """Whether these are classes of pixels."""
    return targets.ndim > 1 and not targets.is_floating_point()
