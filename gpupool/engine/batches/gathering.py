"""Sums and outputs of all ranks, with their gradients. Runs on engines; knows only torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from gpupool.core.errors import TrainingError
from gpupool.data.reading.trees import map_tensors, tensors
from gpupool.engine.group.forming import World


class Total(torch.autograd.Function):
    """The sum of a tensor over the ranks of a group; its gradient is that of all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def gathered(outputs: Any, targets: Any, num_here: int, world: World) -> tuple[Any, Any]:
    """Outputs and targets with the samples of all ranks, by rank, for a loss over pairs of them.

    Each rank computes the loss of the whole batch from these, and DDP's mean of the gradients is
    the one that one rank would have. What has no entry for each sample stays, as a temperature
    does. Of targets, what ranks have padded to other lengths is left out: an error stands in its
    place, for a loss that wants it. Of outputs that is a TrainingError, on every rank.
    """
    if world.size == 1:
        return outputs, targets
    every = world.gather((num_here, [tuple(one.shape) for one in tensors((outputs, targets))]))
    numbers = [num for num, _ in every]
    by_tensor = iter(list(zip(*(shapes for _, shapes in every), strict=True)))
    before, after = sum(numbers[: world.rank]), sum(numbers[world.rank + 1 :])

    def whole(tensor: Tensor) -> Tensor:
        shapes = next(by_tensor)
        # A placeholder, where a rank has no sample, has one row.
        pairs = zip(shapes, numbers, strict=True)
        if not all(shape and shape[0] == max(num, 1) for shape, num in pairs):
            return tensor
        if len({shape[1:] for shape in shapes}) > 1:
            raise TrainingError(
                f"gather=True: the ranks have {', '.join(map(str, shapes))}, which cannot be put "
                "together: let the network, or collate=, give the same shape everywhere, but for "
                "the number of samples."
            )
        own = tensor.byte() if tensor.dtype == torch.bool else tensor
        rows = functional.pad(own[:num_here], [0, 0] * (own.ndim - 1) + [before, after])
        total: Tensor = Total.apply(rows, world.group)
        return total.to(tensor.dtype)

    def whole_or_error(tensor: Tensor) -> Tensor | TrainingError:
        try:
            return whole(tensor)
        except TrainingError as error:
            return error.with_traceback(None)

    return map_tensors(whole, outputs), map_tensors(whole_or_error, targets)
