"""The average of a network over its steps, `ema`: torch's, kept exact. Runs on engines."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gpupool.core.errors import TrainingError


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """A copy of `model`, whose average `update_average` moves on after each step."""
    average = get_ema_multi_avg_fn(decay)

    def averaging(averages: Any, values: Any, num: Any) -> None:
        # torch would cut whole numbers, such as a table of places: 0.9 * 7 + 0.1 * 7 to 6.
        if averages[0].is_floating_point() or averages[0].is_complex():
            average(averages, values, num)
        else:
            torch._foreach_copy_(averages, values)

    return AveragedModel(model, multi_avg_fn=averaging, use_buffers=True)


def update_average(average: AveragedModel, model: nn.Module) -> None:
    """Add the weights and buffers of `model`, as they are after a step, to their average."""
    # torch pairs them by their place, and averages whatever it finds there.
    own, others = average.module.named_buffers(), model.named_buffers()
    if [(name, one.shape) for name, one in own] != [(name, one.shape) for name, one in others]:
        raise TrainingError(
            "ema= averages what the network has before the first step, and it has made other "
            "buffers since: register them in __init__ with the size that they keep, or leave ema "
            "out."
        )
    average.update_parameters(model)
