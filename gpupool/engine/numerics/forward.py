"""A forward pass: its precision, and what the network changes meanwhile. Runs on engines."""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gpupool.core.wire.state_dicts import ExtraState

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ForwardState:
    """The buffers of a network, and what its modules keep beside tensors.

    A module may change a buffer, or put another tensor in its place: `self.mean = 0.9 * self.mean`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name)
            for module in model.modules()
            for name, _ in module.named_buffers(recurse=False)
        ]
        self._extra = ExtraState(model)
        self._buffers: list[Tensor] = []
        self._noted: list[Tensor] = []
        self._noted_extra: list[Any] = []

    def note(self) -> None:
        """Keep a copy of what it is now, on its device, in the place of the one before."""
        buffers = [getattr(module, name) for module, name in self._places]
        if not self._buffers or not all(map(operator.is_, buffers, self._buffers)):
            self._noted = [torch.empty_like(buffer) for buffer in buffers]
        self._buffers = buffers
        _copy_to(self._noted, buffers)
        self._noted_extra = self._extra.note()

    def put_back(self) -> None:
        """Make it what was noted last."""
        _copy_to(self._buffers, self._noted)
        for (module, name), buffer in zip(self._places, self._buffers, strict=True):
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
        self._extra.put_back(self._noted_extra)


def _copy_to(places: list[Tensor], values: list[Tensor]) -> None:
    if places:
        with torch.no_grad():
            torch._foreach_copy_(places, values)


class Evaluating:
    """While this lasts, these batch norms are in evaluation mode.

    With `only_single` those alone that get one value a channel, which has no variance: torch
    refuses to train them on it.
    """

    def __init__(self, modules: list[Any], *, only_single: bool) -> None:
        self._modules = [module for module in modules if module.training]
        self._only_single = only_single
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for module in self._modules:
            if self._only_single:
                self._hooks.append(module.register_forward_pre_hook(_evaluate_single))
            else:
                module.training = False

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            module.training = True


def _evaluate_single(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if inputs[0].numel() == inputs[0].shape[1]:
        module.training = False


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Inside, networks compute mixed in "bf16" or "fp16"; in "float32", as they are."""
    if precision not in _DTYPES:
        return nullcontext()
    return torch.autocast(device.type, _DTYPES[precision])
