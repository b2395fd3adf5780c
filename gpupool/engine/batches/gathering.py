"""Outputs and targets of all ranks, for a loss over pairs of the batch. Runs on engines.

Each rank computes the loss of the whole batch, and its gradient by the outputs of its own samples.
The sum of these over the ranks is the gradient that one rank would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpupool.core.errors import TrainingError
from gpupool.data.reading.trees import map_tensors, tensors
from gpupool.engine.group.forming import World


def gathered(outputs: Any, targets: Any, num_here: int, world: World) -> tuple[Any, Any]:
    """Outputs and targets with the samples of all ranks, by rank.

    What has no entry for each sample stays, as a temperature does; its gradient counts once over
    all ranks. The gradient of what is computed from the result must be taken times `world.size`,
    where ranks are averaged. Of targets with names, such as a whole batch, what ranks have padded
    to other lengths is left out: an error stands in its place, for a loss that wants it.

    Raises TrainingError, on every rank, if outputs differ in more than the number of samples.
    """
    trees = outputs, targets
    every = world.gather((num_here, [tuple(tensor.shape) for tensor in tensors(trees)]))
    numbers = [num for num, _ in every]
    by_tensor = iter(list(zip(*(shapes for _, shapes in every), strict=True)))

    def whole(tensor: Tensor) -> Any:
        found = _whole(tensor, numbers, next(by_tensor), world)
        if isinstance(found, TrainingError) and not is_lenient:
            raise found
        return found

    is_lenient = False
    of_all = map_tensors(whole, outputs)
    is_lenient = isinstance(targets, Mapping)
    return of_all, map_tensors(whole, targets)


def _whole(
    tensor: Tensor, numbers: list[int], shapes: tuple[tuple[int, ...], ...], world: World
) -> Tensor | TrainingError:
    # A placeholder, where a rank has no sample, has one row.
    has_samples = all(
        shape and shape[0] == max(num, 1) for shape, num in zip(shapes, numbers, strict=True)
    )
    if not has_samples:
        if not tensor.requires_grad:
            return tensor
        once = tensor.view_as(tensor)
        once.register_hook(lambda gradient: gradient / world.size)
        return once
    if len({shape[1:] for shape in shapes}) > 1:
        return TrainingError(
            f"gather=True: the ranks have {', '.join(map(str, shapes))}, which cannot be put "
            "together: let the network, or collate=, give the same shape everywhere, but for the "
            "number of samples."
        )
    own = tensor[: numbers[world.rank]]
    if world.size == 1:
        return own
    room = tensor.new_zeros((max(numbers), *tensor.shape[1:]), requires_grad=False)
    room[: len(own)] = own.detach()
    parts = [torch.empty_like(room) for _ in numbers]
    dist.all_gather(parts, room, group=world.group)
    parts = [part[:num] for part, num in zip(parts, numbers, strict=True)]
    parts[world.rank] = own  # with its gradient
    return torch.cat(parts)
