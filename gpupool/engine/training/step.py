"""One step of a training, on this rank's share of a global batch. Runs on engines.

    step = TrainingStep(run, loss, steps_per_epoch, timer)
    for share in epoch_shares(...):
        step.run(share)

The gradient is that of the whole global batch, whatever share each rank has and into however many
micro-batches it is cut. DDP averages over ranks, so each micro-batch's mean loss has the weight
`loss_count * world.size / global_count`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpupool.core.errors import TrainingError
from gpupool.data.reading.trees import map_tensors, rows
from gpupool.engine.batches.form import called
from gpupool.engine.batches.gathering import gathered
from gpupool.engine.batches.share import Share
from gpupool.engine.metrics.evaluation import count_correct
from gpupool.engine.numerics.ddp import StepBuffers, all_used, wrap_ddp
from gpupool.engine.numerics.ema import update_average
from gpupool.engine.numerics.forward import ExtraState, ForwardState, autocast, seed_step
from gpupool.engine.numerics.losses import Loss, add_gradient, require_gradient
from gpupool.engine.numerics.optimizers import set_learning_rates
from gpupool.engine.probe.rank_report import WorkTimer
from gpupool.engine.training.reports import BatchMetrics
from gpupool.engine.training.run import Run


class MicroBatch(NamedTuple):
    """Some samples of a share; `num_here` 0: a placeholder that counts nothing."""

    inputs: Any
    targets: Any
    num_here: int


class TrainingStep:
    """Makes the steps of a training, one after the other; all ranks call it alike.

    Args:
        steps_per_epoch: for the learning rate's schedule; 0 for a stream.
        timer: measures this rank's own work.
    """

    def __init__(self, run: Run, loss: Loss, steps_per_epoch: int, timer: WorkTimer) -> None:
        self._run, self._loss, self._steps_per_epoch = run, loss, steps_per_epoch
        self._timer = timer
        self._parameters = [p for g in run.optimizer.param_groups for p in g["params"]]
        self._buffers = StepBuffers(run.model, run.world, run.options)
        self._before = ForwardState(run.model)
        self._has_undo = False
        self._extra = ExtraState(run.model)
        self._averaged_extra = ExtraState(run.evaluated)
        self._parallel = wrap_ddp(run.model, run.world)
        self._checks_unused = run.world.size > 1
        self._has_run = False

    def run(self, share: Share) -> None:
        """Make one step of this rank's share of a global batch.

        Nothing is read from the device, except in the first step of several ranks, and by fp16 with
        an optimizer that is not fused.
        """
        run = self._run
        options, optimizer, scaler = run.options, run.optimizer, run.scaler
        if not self._has_run and run.step and run.world.size > 1:
            self._prime_ddp(share)
        self._has_run = True
        number = run.step + 1
        lr = set_learning_rates(optimizer, options, number, self._steps_per_epoch, run.epoch)
        self._save_undo()

        # The same random numbers after a resume: they depend on nothing else.
        seed_step(options.seed, run.world.rank, number, run.world.device)
        optimizer.zero_grad(set_to_none=True)
        metrics = self._forward_and_backward(share)
        if options.clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self._parameters, options.clip)

        run.is_step_complete = False  # weights, and what counts them, do not agree from here on
        if scaler is None:
            optimizer.step()
        else:  # which leaves out a step whose gradients are not finite
            scaler.step(optimizer)
            scaler.update()
        if run.ema is not None:
            update_average(run.ema, run.model)
            # What modules keep beside tensors cannot be averaged: the newest is there too.
            self._averaged_extra.put_back(self._extra.note())
        self._has_undo = False
        self._timer.end("optimizer")

        # The step is complete on the host; the device counts it when it is complete there.
        run.completed.add()
        run.step, run.samples_done = number, run.samples_done + share.num_all
        run.reporter.add(number, run.epoch, lr, metrics, share)
        run.is_step_complete = True

    def restore_buffers(self) -> None:
        """Restore the buffers that an incomplete step has changed."""
        if self._has_undo:
            self._before.restore()
            self._has_undo = False

    # ---- forward and backward -------------------------------------------------------------------

    def _forward_and_backward(self, share: Share) -> list[BatchMetrics]:
        """Leave the gradients of the whole global batch in the parameters.

        Returns the metrics of each micro-batch.
        """
        global_count = self._global_count(share)
        self._buffers.before_forward(share)  # of smaller batches: all take rank 0's statistics
        parts = micro_batches(share, self._run.options.accumulate, self._buffers.is_synced)
        metrics = []
        for part in parts:
            # In the last one DDP averages the gradients over the ranks.
            syncs = part is parts[-1]
            with nullcontext() if syncs else self._without_sync():
                metrics.append(self._add_gradient(part, global_count, syncs=syncs))
        self._buffers.after_backward(
            share
        )  # where rank 0 had no samples, its buffers are another's
        return metrics

    def _global_count(self, share: Share) -> int | Tensor:
        """What the loss is a mean over, of the whole global batch.

        Where only the data show it, it is summed over the ranks, and not read from the device: no
        rank waits for it. If nothing is left, every rank's loss counts nothing.
        """
        world = self._run.world
        if self._run.options.gather:
            return share.num_all
        loss_count = self._loss.num_counted(share.targets, share.num_here)
        if isinstance(loss_count, int):
            if self._run.options.on_error != "skip":  # `num_all` includes samples that were skipped
                return share.num_all
            # `full` is computed on the device; `tensor` would be copied there, and waited for.
            loss_count = torch.full((), loss_count, dtype=torch.float64, device=world.device)
        total = world.sum(loss_count.clone() if share.num_here else loss_count * 0)
        return total.where(total > 0, 1)

    def _without_sync(self) -> AbstractContextManager[Any]:
        if isinstance(self._parallel, DistributedDataParallel):
            return self._parallel.no_sync()
        return nullcontext()

    def _add_gradient(
        self, part: MicroBatch, global_count: int | Tensor, *, syncs: bool
    ) -> BatchMetrics:
        """Forward and backward of a micro-batch; `syncs`: the ranks wait for each other."""
        run = self._run
        forward = self._first_forward if syncs and self._checks_unused else self._forward
        weighted_loss, metrics = forward(part, global_count)
        if run.scaler is not None:
            weighted_loss = run.scaler.scale(weighted_loss)
        if syncs and run.world.size > 1:
            self._timer.begin_backward(weighted_loss)
        add_gradient(weighted_loss)
        self._timer.end_backward()
        return metrics

    def _forward(self, part: MicroBatch, global_count: int | Tensor) -> tuple[Tensor, BatchMetrics]:
        """What is minimised, so that its average over ranks is the loss; and its metrics."""
        run, loss, (inputs, targets, num_here) = self._run, self._loss, part
        if run.options.channels_last:
            inputs = map_tensors(_channels_last, inputs)
        norms = self._buffers.batch_norm_context(num_here)
        with autocast(run.world.device, run.options.precision), norms:
            outputs = called(self._parallel, inputs)
            halves = outputs, targets
            if run.options.gather:
                halves = gathered(outputs, targets, num_here, run.world)
            mean_loss = loss(*halves)
        require_gradient(mean_loss)
        weight, loss_count = self._weight(targets, num_here, global_count)
        # With even shares it is 1, and a multiplication has to be differentiated too.
        is_one = isinstance(weight, float) and weight == 1.0
        weighted_loss = mean_loss if is_one else mean_loss * weight
        correct = (count_correct(loss, outputs, targets, num_here) if num_here else None) or (0, 0)
        return weighted_loss, BatchMetrics(num_here, mean_loss.detach(), loss_count, *correct)

    def _weight(
        self, targets: Any, num_here: int, global_count: int | Tensor
    ) -> tuple[float | Tensor, int | Tensor]:
        """What the mean loss of a micro-batch is taken times, and over how much it is a mean."""
        size = self._run.world.size
        if self._run.options.gather:  # each rank has the loss of the whole batch
            return 1.0, num_here
        loss_count = self._loss.num_counted(targets, num_here)
        if not num_here:
            loss_count = loss_count * 0
        return loss_count * size / global_count, loss_count

    # ---- the first step -------------------------------------------------------------------------

    def _prime_ddp(self, share: Share) -> None:
        """Let DDP lay out its gradients as it does in the first step, and change nothing else.

        The order in which ranks add up, and so the last bit of a sum, depends on that layout. A
        resumed training then has the sums of one that was never interrupted.
        """
        self._save_undo()
        self._forward_and_backward(share)
        self.restore_buffers()

    def _first_forward(
        self, part: MicroBatch, global_count: int | Tensor
    ) -> tuple[Tensor, BatchMetrics]:
        """As `_forward`; looks whether each parameter has a part in the loss, on every rank.

        DDP would wait forever for the gradients of those that have none. If there are some, the
        network is wrapped again, with the option to look for them, which costs time in each step.
        """
        self._checks_unused = False
        run = self._run
        before = ForwardState(run.model)  # `self._before` has what was before the whole step
        before.save()
        weighted_loss, metrics = self._forward(part, global_count)
        lacks = float(not all_used(weighted_loss, self._parameters))
        if run.world.sum(torch.tensor(lacks, device=run.world.device)).item():
            before.restore()
            # Nothing may hold the first wrapper, or its hooks would still take gradients away.
            self._parallel = run.model
            del weighted_loss, metrics
            self._parallel = wrap_ddp(run.model, run.world, find_unused=True)
            weighted_loss, metrics = self._forward(part, global_count)
        return weighted_loss, metrics

    def _save_undo(self) -> None:
        """Keep the buffers of the last complete step, for an error or interrupt in this one."""
        self._before.save()
        self._has_undo = True


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.ndim != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def micro_batches(share: Share, number: int, keep_empty: bool) -> list[MicroBatch]:
    """The share in `number` micro-batches: those of the global batch, or of nearly equal size.

    Those without samples are left out, unless `keep_empty`, where every rank must compute as many;
    a placeholder takes their place then. There is always one.
    """
    if number == 1 or (share.num_here == 0 and not keep_empty):
        return [MicroBatch(share.inputs, share.targets, share.num_here)]
    cuts = [share.num_here * i // number for i in range(number + 1)]
    if len(share.part_sizes) == number and sum(share.part_sizes) == share.num_here:  # none skipped
        cuts = [0, *accumulate(share.part_sizes)]
    return [_cut(share, *cut) for cut in pairwise(cuts) if cut[0] < cut[1] or keep_empty]


def _cut(share: Share, start: int, stop: int) -> MicroBatch:
    # A placeholder is the first sample: it has to pass through the network.
    first, end = (start, stop) if start < stop else (0, 1)
    num = max(share.num_here, 1)
    try:
        inputs, targets = (rows(half, first, end, num) for half in (share.inputs, share.targets))
    except ValueError as error:
        raise TrainingError(
            f"accumulate= cuts a batch of {num} samples into parts, and this one has {error}: let "
            "collate= give tensors or lists with an entry for each sample, or leave it out."
        ) from None
    return MicroBatch(inputs, targets, stop - start)
