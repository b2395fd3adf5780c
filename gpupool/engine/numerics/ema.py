"""The average of a network over its steps, `ema`: torch's, kept exact. Runs on engines."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

_Tensors = tuple[Tensor, ...] | list[Tensor]


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """A copy of `model`, whose average `update_average` moves on after each step."""
    return AveragedModel(model, multi_avg_fn=_averaging(decay), use_buffers=True)


def update_average(average: AveragedModel, model: nn.Module) -> None:
    """Add the weights and buffers of `model`, as they are after a step, to their average."""
    _match_buffers(average.module, model)
    average.update_parameters(model)


def _match_buffers(module: nn.Module, model: nn.Module) -> None:
    """Give a copy of `model` the buffers that this has made since, or recreated in another size.

    torch pairs them by their place, and averages whatever it finds there.
    """
    twins: dict[int, Tensor | None] = {}  # one that several modules share stays one
    for own, other in zip(module.modules(), model.modules(), strict=True):
        for name, buffer in other._buffers.items():
            twin = own._buffers.get(name)
            if _kind(twin) == _kind(buffer):
                twins[id(buffer)] = twin
                continue
            if id(buffer) not in twins:
                twins[id(buffer)] = None if buffer is None else buffer.detach().clone()
            is_kept = name not in other._non_persistent_buffers_set
            own.register_buffer(name, twins[id(buffer)], persistent=is_kept)


def _kind(buffer: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if buffer is None else (buffer.shape, buffer.dtype)


def _averaging(decay: float) -> Callable[[_Tensors, _Tensors, Tensor | int], None]:
    """torch's exponential average of numbers; whole numbers, such as a table of places, as is."""
    average = get_ema_multi_avg_fn(decay)

    def averaging(averages: _Tensors, values: _Tensors, num: Tensor | int) -> None:
        # torch would cut 0.9 * 7 + 0.1 * 7 off to 6.
        if averages[0].is_floating_point() or averages[0].is_complex():
            average(averages, values, num)
        else:
            torch._foreach_copy_(averages, values)

    return averaging
