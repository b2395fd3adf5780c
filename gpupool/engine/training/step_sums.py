"""What a step gave, kept on the device until it is asked for. Runs on engines; knows only torch.

The numbers of a step are single values that other computations left behind, so that keeping them
costs next to nothing: they become a table of many steps at once (`table`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpupool.engine.metrics.evaluation import right_classes
from gpupool.engine.numerics.losses import Loss


class Measured(NamedTuple):
    """Of a share, or a part of one: numbers, or tensors of the device from which none is read.

    `mean_loss` and `counted` have shape (), or (terms,) where the loss has several. `right` of
    `num_classed` targets that have a class were found; 0 of 0 where there are none.
    """

    num_here: int
    mean_loss: Tensor
    counted: int | Tensor
    right: int | Tensor = 0
    num_classed: int | Tensor = 0
    num_classes: int = 0


def measure(
    loss: Loss, mean_loss: Tensor, counted: int | Tensor, outputs: Any, targets: Any, num_here: int
) -> Measured:
    """What is worth knowing of a share, without reading from the device.

    See `right_classes` for what has an accuracy.
    """
    mean_loss = mean_loss.detach()
    judged, _ = loss.judged(outputs, targets)
    num_classes = judged.shape[1] if isinstance(judged, Tensor) and judged.ndim > 1 else 0
    right = right_classes(loss, outputs, targets, num_here) if num_here else None
    num_right, num_classed = right or (0, 0)
    return Measured(num_here, mean_loss, counted, num_right, num_classed, num_classes)


def table(measured: Sequence[Measured], num_terms: int, device: torch.device) -> Tensor:
    """A row for each, as the `sums` of an `Evaluation`: shape (len(measured), width(num_terms)).

    float64 on the device. What counts nothing adds nothing.
    """
    num = len(measured)
    counted = _column([one.counted for one in measured], device).view(num, -1)
    means = torch.stack([one.mean_loss for one in measured]).to(torch.float64).view(num, -1)
    counted = counted.expand_as(means)
    rest = torch.stack(
        [
            _column([one.right for one in measured], device),
            _column([one.num_classed for one in measured], device),
            _column([one.num_here for one in measured], device),
        ],
        1,
    )
    return torch.cat([(means * counted).where(counted > 0, 0), counted, rest], 1)


def width(num_terms: int) -> int:
    """Numbers in a row of `table`."""
    return 2 * num_terms + 3


def _column(values: Sequence[int | Tensor], device: torch.device) -> Tensor:
    """As float64 on the device: one copy of those that are numbers, one stack of the others."""
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack(list(values)).to(torch.float64)  # type: ignore[arg-type]
    if not any(isinstance(value, Tensor) for value in values):
        return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)
    return torch.stack(
        [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
    )
