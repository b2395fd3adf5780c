"""The average of a network over its steps, `ema`: torch's, kept exact. Runs on engines."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gpupool.core.errors import TrainingError

_Tensors = tuple[Tensor, ...] | list[Tensor]


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """A copy of `model`, whose average `update_average` moves on after each step."""
    return AveragedModel(model, multi_avg_fn=_averaging(decay), use_buffers=True)


def update_average(average: AveragedModel, model: nn.Module) -> None:
    """Add the weights and buffers of `model`, as they are after a step, to their average.

    Raises TrainingError if they are not those that were there before the first step.
    """
    # torch pairs them by their place, and averages whatever it finds there.
    own, others = average.module.named_buffers(), model.named_buffers()
    if [(name, one.shape) for name, one in own] != [(name, one.shape) for name, one in others]:
        raise TrainingError(
            "ema= averages what the network has before the first step, and it has made other "
            "buffers since: register them in __init__ with the size that they keep, or leave ema "
            "out."
        )
    average.update_parameters(model)


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
