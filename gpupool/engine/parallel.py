"""A network on several ranks, whose gradients are averaged. Runs on engines; knows only torch."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from gpupool.core.training_options import TrainingOptions
from gpupool.data import shards
from gpupool.engine.group import World

# torch 2.15 has another name for it, and warns of the old one.
_SHARE_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


def wrapped(
    model: nn.Module, world: World, options: TrainingOptions, *, find_unused: bool = False
) -> nn.Module:
    """The network as the ranks train it: in DDP, or as it is on one rank.

    All ranks then have the parameters of the first one. Buffers are made those of the first rank in
    each step only if some belong to other modules than batch norms: what these keep changes no
    outputs in training, see `share_statistics`.
    """
    if world.size == 1:
        return model
    if find_unused:
        gc.collect()  # the earlier wrapper would still take gradients away
    in_norms = {id(b) for m in model.modules() if isinstance(m, _BatchNorm) for b in m.buffers()}
    shares_buffers = any(id(b) not in in_norms for b in model.buffers())
    parallel = DistributedDataParallel(
        model,
        process_group=world.group,
        **{_SHARE_BUFFERS: shares_buffers},  # type: ignore[arg-type]
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused,
    )
    if options.compress != "none":
        parallel.register_comm_hook(world.group, _HOOKS[options.compress])
    return parallel


def statistics_rank(world: World, options: TrainingOptions, num_all: int) -> int:
    """The first rank that has some of `num_all` samples of a batch; its buffers count."""
    batch = np.arange(num_all)
    shares = (shards.shard(batch, r, world.size, options.rank_load) for r in range(world.size))
    return next(rank for rank, share in enumerate(shares) if len(share))


def share_statistics(model: nn.Module, world: World, rank: int = 0) -> None:
    """Give every rank the buffers of one of them: the statistics of "local" batch norms."""
    if world.size == 1:
        return
    by_kind: dict[torch.dtype, list[Tensor]] = {}
    for buffer in model.buffers():
        by_kind.setdefault(buffer.dtype, []).append(buffer)
    with torch.no_grad():
        for buffers in by_kind.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(flat, group=world.group, group_src=rank)
            pieces = flat.split([buffer.numel() for buffer in buffers])
            for buffer, piece in zip(buffers, pieces, strict=True):
                buffer.copy_(piece.view_as(buffer))


def all_take_part(objective: Tensor, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether each of these parameters is in the graph of what is minimised."""
    seen: set[Any] = set()
    found: set[int] = set()
    waiting = [objective.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of the nodes that add up a leaf's gradient
        if variable is not None:
            found.add(id(variable))
        waiting += [following for following, _ in node.next_functions]
    return all(id(parameter) in found for parameter in parameters)
