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
    if _kind(old) != _kind(new):
        return False
    if isinstance(old, nn.Module) and isinstance(new, nn.Module):
        return _module_fits(old, new)
    if isinstance(old, Optimizer) and isinstance(new, Optimizer):
        return _shapes(old) == _shapes(new)
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return _tensor_fits(old, new)
    return isinstance(old, LRScheduler)


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


def _kind(obj: object) -> tuple[str, str]:
    """The name of its class: a class of the notebook is another object on every rank."""
    return type(obj).__module__, type(obj).__qualname__


def _shapes(optimizer: Optimizer) -> list[list[tuple[torch.Size, torch.dtype]]]:
    groups = optimizer.param_groups
    return [[(p.shape, p.dtype) for p in group["params"]] for group in groups]


def _tensor_fits(old: Tensor, new: Tensor) -> bool:
    return (
        (old.shape, old.dtype, old.layout) == (new.shape, new.dtype, new.layout)
        and old.device == new.device
        and old.is_leaf
    )


def _module_fits(old: nn.Module, new: nn.Module) -> bool:
    mine, others = dict(old.named_modules()), dict(new.named_modules())
    if mine.keys() != others.keys():
        return False
    if any(_kind(mine[name]) != _kind(others[name]) for name in mine):
        return False
    return _tensors_fit(dict(old.named_parameters()), dict(new.named_parameters())) and (
        _tensors_fit(dict(old.named_buffers()), dict(new.named_buffers()))
    )


def _tensors_fit(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return old.keys() == new.keys() and all(_tensor_fits(old[name], new[name]) for name in old)


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
