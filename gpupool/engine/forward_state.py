"""What a network changes while it computes outputs, to be noted and put back. Runs on engines."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from gpupool.core.state_dicts import ExtraState


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
