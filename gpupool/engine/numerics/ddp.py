"""A network on several ranks: its gradients are averaged, its buffers kept alike. Runs on engines.

Each rank's forward changes its own buffers, as statistics of batch norms. Rank 0's are saved, and
single samples are normalised with them, so they are made alike where that matters.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpupool.core.options.training_options import TrainingOptions
from gpupool.engine.batches.shares import Share
from gpupool.engine.group.forming import World
from gpupool.engine.numerics.batch_norm import SyncBatchNorm, batch_norms, counting, evaluating

# torch 2.15 has another name for it, and warns of the old one.
_PARAMETERS = inspect.signature(DistributedDataParallel).parameters
_SHARE_BUFFERS = next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in _PARAMETERS)


def wrap_ddp(model: nn.Module, world: World, *, find_unused: bool = False) -> nn.Module:
    """The network in DDP, with the first rank's parameters on all; or as it is on one rank.

    Buffers are made those of the first rank in each step only if some belong to other modules than
    batch norms: what these keep changes no outputs in training, see `share_buffers`.
    """
    if world.size == 1:
        return model
    if find_unused:
        gc.collect()  # the earlier wrapper would still take gradients away
    in_norms = {id(one) for norm in batch_norms(model) for one in norm.buffers()}
    return DistributedDataParallel(
        model,
        process_group=world.group,
        **{_SHARE_BUFFERS: any(id(one) not in in_norms for one in model.buffers())},  # type: ignore[arg-type]
        gradient_as_bucket_view=True,  # saves a copy of all gradients
        find_unused_parameters=find_unused,
    )


def share_buffers(buffers: Iterable[Tensor], world: World, rank: int = 0) -> None:
    """Give every rank what these hold on one of them: the statistics of "local" batch norms."""
    own = list(buffers) if world.size > 1 else []
    if not own:
        return
    with torch.no_grad():
        # As bytes, in one broadcast: of any number format, and a round trip for all.
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in own])
        dist.broadcast(flat, group=world.group, group_src=rank)
        pieces = flat.split([tensor.nbytes for tensor in own])
        for tensor, piece in zip(own, pieces, strict=True):
            tensor.copy_(piece.clone().view(tensor.dtype).view_as(tensor))


_FEW = 4  # samples, for the statistics of a batch norm


class StepBuffers:
    """Keeps the buffers of a network what one process would have; all ranks call it alike."""

    def __init__(self, model: nn.Module, world: World, options: TrainingOptions) -> None:
        self._model, self._world, self._options = model, world, options
        self._norms = batch_norms(model)
        # Where it is, each rank must compute as many micro-batches.
        self.is_synced = any(isinstance(norm, SyncBatchNorm) for norm in self._norms)
        self._is_local = options.batch_norm != "frozen" and not self.is_synced
        self._may_be_single = False  # this share has fewer samples than usual

    def trouble(self, num_samples: int) -> str:
        """What to tell of data whose last batch is too small for batch norms; "" if it is not."""
        size, num_ranks = self._options.batch_size, self._world.size
        last = num_samples % size if num_samples > size else 0
        most = -(-last // num_ranks)
        if not (self._norms and self._is_local and last) or most >= _FEW or size < 8 * num_ranks:
            return ""
        sizes = range(size - 1, 0, -1)
        better = next(one for one in sizes if not num_samples % one or num_samples % one > one / 2)
        return (
            f"The last batch of each epoch has {last} of {size} samples, at most {most} on a rank. "
            "The statistics of batch norms over so few can undo what was learned: "
            f"batch_size={better} leaves no such batch."
        )

    def before_forward(self, share: Share) -> None:
        """Make statistics that this step may be normalised with those of the first rank.

        A single sample is normalised with the statistics so far: by those that a checkpoint has,
        or a resumed training would be another one. Which share skipping has left with one sample,
        its own rank alone knows, so all share in every step then.
        """
        is_smaller = share.num_all < self._options.batch_size
        self._may_be_single = is_smaller or bool(share.skipped)
        if self._is_local and (is_smaller or self._options.on_error == "skip"):
            share_buffers((one for norm in self._norms for one in norm.buffers()), self._world)

    def batch_norm_context(self, num_here: int) -> AbstractContextManager[Any]:
        """A placeholder leaves no trace in batch norms, nor does a sample that is one value."""
        if num_here > 1 or not self._norms:
            return nullcontext()
        if self.is_synced:
            return counting(num_here > 0)
        if num_here and not self._may_be_single:
            return nullcontext()  # a full batch always has this size: let torch raise
        return evaluating(self._norms, only_single=num_here == 1)

    def after_backward(self, share: Share) -> None:
        """Rank 0's buffers are saved: where it has no samples, those of the first rank that has."""
        # Computed, not asked of the others: shares follow from the numbers alone, see `shard`.
        if first := -(-self._world.size // share.num_all) - 1:
            share_buffers(self._model.buffers(), self._world, first)
