"""Change an object to what another one is, so that all who refer to it see that. Runs on engines.

An optimizer refers to parameters, a scheduler to its optimizer, DDP to its module: objects whose
contents can be replaced in a well-defined way keep their identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_PLAIN = (int, float, complex, bool, str, bytes, type(None))


def fits(old: object, new: object) -> bool:
    """Whether `update(old, new)` makes `old` mean what `new` does."""
    wanted = _outline(new)
    return wanted is not None and _outline(old) == wanted


def update(old: Any, new: Any) -> bool:
    """Make `old`, which fits, what `new` is; False if its class would not have it."""
    try:
        if isinstance(old, nn.Module):
            _update_module(old, new)
        elif isinstance(old, Tensor):
            with torch.no_grad():
                old.copy_(new)
        else:  # an optimizer or a scheduler
            old.load_state_dict(new.state_dict())
    except Exception:  # code of the user's: the caller has another way
        return False
    return True


def _outline(obj: Any) -> Any:
    """What has to be the same on both sides; None of what cannot be changed in place."""
    # By its name: a class of the notebook is another object on every rank.
    kind = type(obj).__module__, type(obj).__qualname__
    if isinstance(obj, Tensor):
        return kind, obj.shape, obj.dtype, obj.layout, obj.device, obj.is_leaf
    if isinstance(obj, nn.Module):
        own = [*obj.named_parameters(recurse=False), *obj.named_buffers(recurse=False)]
        return kind, [(name, _outline(part)) for name, part in (*own, *obj.named_children())]
    if isinstance(obj, Optimizer):
        groups = obj.param_groups
        return kind, [[(p.shape, p.dtype) for p in group["params"]] for group in groups]
    return kind if isinstance(obj, LRScheduler) else None


def _update_module(old: nn.Module, new: nn.Module) -> None:
    """Its state; the buffers that are not part of that; whether it trains, and plain attributes."""
    old.load_state_dict(new.state_dict())
    with torch.no_grad():
        for buffer, other in zip(old.buffers(), new.buffers(), strict=True):
            buffer.copy_(other)
    for parameter, other in zip(old.parameters(), new.parameters(), strict=True):
        parameter.requires_grad_(other.requires_grad)
    for mine, others in zip(old.modules(), new.modules(), strict=True):
        if isinstance(mine, DistributedDataParallel):  # its numbers are about its own buckets
            mine.training = others.training
            continue
        for key, value in vars(others).items():
            if isinstance(value, _PLAIN):
                setattr(mine, key, value)
