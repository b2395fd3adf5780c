"""A network on several ranks, whose gradients are averaged. Runs on engines; knows only torch."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from gpupool.core.errors import TrainingError
from gpupool.data.reading import shards
from gpupool.engine.group.forming import World

# torch 2.15 has another name for it, and warns of the old one.
_SHARE_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
# What DDP can send: what gloo and NCCL have a name for; complex numbers it views as real ones.
_CAN_SEND = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.complex128, torch.complex64, torch.complex32),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}


def wrap_ddp(model: nn.Module, world: World, *, find_unused: bool = False) -> nn.Module:
    """The network as the ranks train it: in DDP, or as it is on one rank.

    All ranks then have the parameters of the first one. Buffers are made those of the first rank in
    each step only if some belong to other modules than batch norms: what these keep changes no
    outputs in training, see `share_statistics`.

    Raises TrainingError, on every rank, if the network has numbers that DDP cannot send.
    """
    if world.size == 1:
        return model
    _check_can_send(model)
    if find_unused:
        gc.collect()  # the earlier wrapper would still take gradients away
    # Statistics of batch norms are shared when they are needed, not in each step.
    in_norms = {id(b) for m in model.modules() if isinstance(m, _BatchNorm) for b in m.buffers()}
    shares_buffers = any(id(b) not in in_norms for b in model.buffers())
    return DistributedDataParallel(
        model,
        process_group=world.group,
        **{_SHARE_BUFFERS: shares_buffers},  # type: ignore[arg-type]
        gradient_as_bucket_view=True,  # saves a copy of all gradients
        find_unused_parameters=find_unused,
    )


def _check_can_send(model: nn.Module) -> None:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.dtype not in _CAN_SEND:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise TrainingError(
                f"{name} of the network holds numbers of the format {kind}, which ranks cannot "
                "exchange: store them as int32 or float32, or train on one rank."
            )


def statistics_rank(world: World, global_batch_size: int) -> int:
    """The first rank that has some of `global_batch_size` samples of a batch; its buffers count."""
    # Computed, not asked of the others: shares follow from the numbers alone.
    batch = np.arange(global_batch_size)
    shares = (shards.shard(batch, r, world.size) for r in range(world.size))
    return next(rank for rank, share in enumerate(shares) if len(share))


def share_statistics(model: nn.Module, world: World, rank: int = 0) -> None:
    """Give every rank the buffers of one of them: the statistics of "local" batch norms."""
    share_tensors(model.buffers(), world, rank)


def share_tensors(tensors: Iterable[Tensor], world: World, rank: int = 0) -> None:
    """Give every rank what these tensors hold on one of them; as bytes, so of any number format."""
    if world.size == 1:
        return
    # One broadcast for each number format: a buffer at a time would cost a round trip each.
    by_kind: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault(tensor.dtype, []).append(tensor)
    with torch.no_grad():
        for kind, own in by_kind.items():
            flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in own])
            dist.broadcast(flat, group=world.group, group_src=rank)
            pieces = flat.split([tensor.nbytes for tensor in own])
            for tensor, piece in zip(own, pieces, strict=True):
                tensor.copy_(piece.view(kind).view_as(tensor))


def all_used(loss: Tensor, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether each of these parameters is, or may be, in the graph of what is minimised."""
    # Walked with a list, not by recursion: the graph of a deep network is too deep for that.
    seen: set[Any] = set()
    found: set[int] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True  # of torch's reentrant checkpoint, which hides what it has computed
        seen.add(node)
        variable = getattr(node, "variable", None)  # of the nodes that add up a leaf's gradient
        if variable is not None:
            found.add(id(variable))
        waiting += [following for following, _ in node.next_functions]
    return all(id(parameter) in found for parameter in parameters)
