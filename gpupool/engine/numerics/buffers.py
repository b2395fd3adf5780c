"""The buffers of a network in a step: statistics of batch norms, and others. Runs on engines.

Each rank's forward changes its own. Rank 0's are saved, and those of single samples are normalised
with them, so they are made alike where that matters.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from gpupool.core.options.training_options import TrainingOptions
from gpupool.engine.batches.share import Share
from gpupool.engine.group.forming import World
from gpupool.engine.numerics.batch_norm import SyncBatchNorm, batch_norms, counting
from gpupool.engine.numerics.ddp import share_statistics, share_tensors, statistics_rank
from gpupool.engine.numerics.forward import evaluating


class StepBuffers:
    """Keeps the buffers of a network what one process would have; all ranks call it alike.

    `is_synced`: batch norms go over all ranks, so each must compute as many micro-batches.
    """

    def __init__(self, model: nn.Module, world: World, options: TrainingOptions) -> None:
        self._model, self._world, self._options = model, world, options
        self._norms = batch_norms(model)
        self.is_synced = any(isinstance(norm, SyncBatchNorm) for norm in self._norms)
        trains_norms = bool(self._norms) and options.batch_norm != "frozen"
        self._is_local = trains_norms and not self.is_synced
        self._has_buffers = any(True for _ in model.buffers())
        self._buffer_rank = statistics_rank(world, options.batch_size)
        self._is_partial_batch = False  # this share has fewer samples than usual

    def before_forward(self, share: Share) -> None:
        """Make statistics that this step may be normalised with those of the first rank.

        A single sample is normalised with the statistics so far: by those that a checkpoint has,
        or a resumed training would be another one. Which share skipping has left with one sample,
        its own rank alone knows, so all share in every step then.
        """
        is_smaller = share.num_all < self._options.batch_size
        self._is_partial_batch = is_smaller or bool(share.skipped)
        if self._is_local and (is_smaller or self._options.on_error == "skip"):
            kept = [one for norm in self._norms for one in norm.buffers(recurse=False)]
            share_tensors(kept, self._world)

    def batch_norm_context(self, num_here: int) -> AbstractContextManager[Any]:
        """A placeholder leaves no trace in batch norms, nor does a sample that is one value."""
        if num_here > 1 or not self._norms:
            return nullcontext()
        if self.is_synced:
            return counting(num_here > 0)
        if num_here and not self._is_partial_batch:
            return nullcontext()  # a full batch always has this size: let torch raise
        return evaluating(self._norms, only_single=num_here == 1)

    def after_backward(self, share: Share) -> None:
        """Rank 0's buffers are saved: where it has no samples, those of the first rank that has."""
        rank = self._buffer_rank
        if share.num_all < self._options.batch_size:
            rank = statistics_rank(self._world, share.num_all)
        if rank and self._has_buffers:
            share_statistics(self._model, self._world, rank)
