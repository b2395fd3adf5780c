"""One step of a training: forward, backward, clip, step, report. Runs on engines; knows only torch.

    step = TrainingStep(run, loss, steps_per_epoch)
    for share in epoch_shares(...):
        step.take(share)

The gradient is that of the whole global batch, whatever share each rank has and into however many
micro-batches it is cut. DDP averages gradients over ranks. So each micro-batch's mean loss is
weighted with what it is a mean over, times the ranks, over what counts on all ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from gpupool.core.options.schedule import lr_factor
from gpupool.core.wire.state_dicts import ExtraState
from gpupool.engine.batches.share import Share
from gpupool.engine.batches.trees import map_tensors
from gpupool.engine.numerics.batch_norm import SyncBatchNorm, counting
from gpupool.engine.numerics.ddp import (
    all_take_part,
    share_statistics,
    share_tensors,
    statistics_rank,
    wrapped,
)
from gpupool.engine.numerics.ema import update_average
from gpupool.engine.numerics.forward import Evaluating, ForwardState, autocast, seed_step
from gpupool.engine.numerics.losses import Loss
from gpupool.engine.numerics.optimizers import clip_gradients, needs_closure, set_learn_rates
from gpupool.engine.probe.rank_report import WorkTimer
from gpupool.engine.training.reports import BatchMetrics, batch_metrics
from gpupool.engine.training.run import Run


class TrainingStep:
    """Makes the steps of a training, one after the other; all ranks call it alike.

    Args:
        steps_per_epoch: for the learning rate's schedule; 0 of a stream.
        timer: measures this rank's own work.
    """

    def __init__(self, run: Run, loss: Loss, steps_per_epoch: int, timer: WorkTimer) -> None:
        self._run, self._loss, self._steps_per_epoch = run, loss, steps_per_epoch
        self._timer = timer
        self._parallel = wrapped(run.model, run.world, run.options)
        self._is_first = run.world.size > 1
        self._parameters = [p for g in run.optimizer.param_groups for p in g["params"]]
        modules = list(run.model.modules())
        self._is_synced = any(isinstance(module, SyncBatchNorm) for module in modules)
        self._norms = [module for module in modules if isinstance(module, _BatchNorm)]
        trains_norms = bool(self._norms) and run.options.batch_norm != "frozen"
        self._is_local = trains_norms and not self._is_synced
        self._has_buffers = any(True for _ in run.model.buffers())
        self._first_rank = statistics_rank(run.world, run.options, run.options.batch_size)
        self._before = ForwardState(run.model)
        self._extra = ExtraState(run.model)
        self._averaged_extra = ExtraState(run.evaluated)
        self._is_midway = False
        self._is_short = False  # this share has fewer samples than usual

    def take(self, share: Share) -> None:
        """Make one step of this rank's share of a global batch.

        Nothing is read from the device, except by an optimizer that does so itself.
        """
        run, options = self._run, self._run.options
        lr = options.lr * lr_factor(options, run.step + 1, self._steps_per_epoch, run.epoch)
        set_learn_rates(run.optimizer, lr)
        if options.checkpoint is not None:  # after an error the last complete step is saved
            self._before.save()
            self._is_midway = True

        if needs_closure(run.optimizer):  # it does all of this as often as it wants
            metrics = self._step_by_closure(share)
        else:
            metrics = self._forward_and_backward(share)
            self._clip()
            run.begin_change()  # an interrupt waits from here until the step is complete
            self._step()
        self._average()
        self._is_midway = False
        self._timer.end_work()

        # The report: kept on the device, summed over ranks every few steps, read a step later.
        run.step += 1
        run.samples_done += share.num_all
        run.reporter.add(run.step, run.epoch, lr, metrics, share)
        run.end_change()

    # ---- forward and backward -------------------------------------------------------------------

    def _forward_and_backward(self, share: Share) -> list[BatchMetrics]:
        """Leave the gradients of the whole global batch in the parameters."""
        run, options = self._run, self._run.options
        seed_step(options.seed, run.world.rank, run.step + 1, run.world.device)
        run.optimizer.zero_grad(set_to_none=True)
        num_all = self._num_in_all(share)
        self._share_buffers(share)
        *others, last = micro_batches(share, options.accumulate, keep_empty=self._is_synced)
        metrics = []
        for micro_batch in others:
            with self._without_sync():
                metrics.append(self._add_gradient(micro_batch, num_all))
        metrics.append(self._add_gradient(last, num_all, is_last=True))
        self._share_statistics(share)
        return metrics

    def _add_gradient(
        self, micro_batch: MicroBatch, num_all: int | Tensor, *, is_last: bool = False
    ) -> BatchMetrics:
        """Forward and backward of a micro-batch; in the last one the ranks wait for each other."""
        run = self._run
        forward = self._first_forward if is_last and self._is_first else self._forward
        objective, metrics = forward(micro_batch, num_all)
        if run.scaler is not None:
            objective = run.scaler.scale(objective)
        if is_last and run.world.size > 1:
            self._timer.begin_backward(objective)
        objective.backward()
        self._timer.end_backward()
        return metrics

    def _forward(
        self, micro_batch: MicroBatch, num_all: int | Tensor
    ) -> tuple[Tensor, BatchMetrics]:
        """What is minimised, so that its average over ranks is the loss; and its metrics."""
        run, (inputs, targets, num_here) = self._run, micro_batch
        if run.options.channels_last:
            inputs = map_tensors(_channels_last, inputs)
        with autocast(run.world.device, run.options.precision), self._norms_count(num_here):
            outputs = self._parallel(inputs)
            mean_loss = self._loss(outputs, targets)
        counted = self._loss.num_counted(targets, num_here)
        if not num_here:
            counted = counted * 0
        weight = counted * run.world.size / num_all
        # With even shares it is 1, and a multiplication has to be differentiated too.
        is_one = isinstance(weight, float) and weight == 1.0
        objective = mean_loss if is_one else mean_loss * weight
        if objective.ndim:  # a loss of several terms
            objective = objective.sum()
        return objective, batch_metrics(self._loss, mean_loss, counted, outputs, targets, num_here)

    def _first_forward(
        self, micro_batch: MicroBatch, num_all: int | Tensor
    ) -> tuple[Tensor, BatchMetrics]:
        """As `_forward`; looks whether each parameter has a part in the loss, on every rank.

        DDP would wait for ever for the gradients of those that have none. If there are some, it is
        made again with the option to look for them, which costs time in each step.
        """
        self._is_first = False
        run = self._run
        before = ForwardState(run.model)  # `self._before` has what was before the whole step
        before.save()
        objective, metrics = self._forward(micro_batch, num_all)
        lacks = float(not all_take_part(objective, self._parameters))
        if run.world.sum(torch.tensor(lacks, device=run.world.device)).item():
            before.restore()
            # Nothing may hold the first wrapper, or its hooks would still take gradients away.
            self._parallel = run.model
            del objective, metrics
            self._parallel = wrapped(run.model, run.world, run.options, find_unused=True)
            objective, metrics = self._forward(micro_batch, num_all)
        return objective, metrics

    def _num_in_all(self, share: Share) -> int | Tensor:
        """What the loss is a mean over, of the whole global batch.

        Where only the data show it, it is summed over the ranks, and not read from the device: no
        rank waits for it. If nothing is left, every rank's loss counts nothing.
        """
        world = self._run.world
        counted = self._loss.num_counted(share.targets, share.num_here)
        if isinstance(counted, int):
            if self._run.options.on_error != "skip":
                return share.num_all
            # `full` is computed on the device; `tensor` would be copied there, and waited for.
            counted = torch.full((), counted, dtype=torch.float64, device=world.device)
        counted = world.sum(counted.clone() if share.num_here else counted * 0)
        return counted.where(counted > 0, 1)

    def _without_sync(self) -> AbstractContextManager[Any]:
        if isinstance(self._parallel, DistributedDataParallel):
            return self._parallel.no_sync()
        return nullcontext()

    # ---- clip, step, average --------------------------------------------------------------------

    def _clip(self) -> None:
        options, scaler = self._run.options, self._run.scaler
        if options.clip is None:
            return
        if scaler is not None:
            scaler.unscale_(self._run.optimizer)
        clip_gradients(self._parameters, options.clip, options.clip_method)

    def _step(self) -> None:
        run = self._run
        if run.scaler is None:
            run.optimizer.step()
        else:  # which leaves out a step whose gradients are not finite
            run.scaler.step(run.optimizer)
            run.scaler.update()

    def _average(self) -> None:
        """Update the average of the weights; what is no tensor is the newest there too."""
        if self._run.ema is not None:
            update_average(self._run.ema, self._run.model)
            self._averaged_extra.put_back(self._extra.note())

    def _step_by_closure(self, share: Share) -> list[BatchMetrics]:
        """Forward, backward, clip and step, as often as the optimizer (L-BFGS) wants.

        All ranks give it the same numbers, so that it does the same everywhere.
        """
        run = self._run
        first: list[BatchMetrics] = []  # of the weights before the step, as every other optimizer's

        def closure() -> float:
            metrics = self._forward_and_backward(share)
            self._clip()
            num_all = torch.as_tensor(self._num_in_all(share), dtype=torch.float64)
            total = torch.stack([(one.mean_loss * one.counted).double() for one in metrics])
            first[:] = first or metrics
            return float((run.world.sum(total.sum(0)) / num_all.to(total.device)).sum().item())

        run.is_whole = False  # an interrupt may leave half a step: it may compute for long
        run.optimizer.step(closure)
        return first

    # ---- batch norms and other buffers ----------------------------------------------------------

    def _share_buffers(self, share: Share) -> None:
        """Make statistics that this step may be normalised with those of the first rank.

        A single sample is normalised with the statistics so far: by those that a checkpoint has,
        or a resumed training would be another one. Which share skipping has left with one sample,
        its own rank alone knows, so all share in every step then.
        """
        run = self._run
        is_smaller = share.num_all < run.options.batch_size
        self._is_short = is_smaller or bool(share.skipped)
        if self._is_local and (is_smaller or run.options.on_error == "skip"):
            kept = [one for norm in self._norms for one in norm.buffers(recurse=False)]
            share_tensors(kept, run.world)

    def _share_statistics(self, share: Share) -> None:
        """Rank 0's buffers are saved: where it has no samples, those of the first rank that has."""
        run, first = self._run, self._first_rank
        if share.num_all < run.options.batch_size:
            first = statistics_rank(run.world, run.options, share.num_all)
        if first and self._has_buffers:
            share_statistics(run.model, run.world, first)

    def _norms_count(self, num_here: int) -> AbstractContextManager[Any]:
        """A placeholder leaves no trace in batch norms, nor does a sample that is one value."""
        if num_here > 1 or not self._norms:
            return nullcontext()
        if self._is_synced:
            return counting(num_here > 0)
        if num_here and not self._is_short:  # it would be so in every step, so torch's error is due
            return nullcontext()
        return Evaluating(self._norms, only_single=num_here == 1)

    # ---- before the first step, and after an error ----------------------------------------------

    def warm_up(self, share: Share) -> None:
        """Let DDP lay out its gradients as it does in the first step, and change nothing else.

        The order in which ranks add up, and so the last bit of a sum, depends on that layout. A
        resumed training then has the sums of one that was never interrupted.
        """
        if self._run.world.size > 1:
            self._before.save()
            self._forward_and_backward(share)
            self._before.restore()
            self._run.optimizer.zero_grad(set_to_none=True)

    def undo(self) -> None:
        """After an error: restore the buffers that a step has changed which did not complete."""
        if self._is_midway:
            self._before.restore()


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.ndim != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


class MicroBatch(NamedTuple):
    """Some samples of a share; `num_here` 0: a placeholder that counts nothing."""

    inputs: Any
    targets: Any
    num_here: int


def micro_batches(share: Share, number: int, *, keep_empty: bool) -> list[MicroBatch]:
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
    part = slice(start, stop) if start < stop else slice(0, 1)
    inputs = map_tensors(lambda tensor: tensor[part], share.inputs)
    targets = map_tensors(lambda tensor: tensor[part], share.targets)
    return MicroBatch(inputs, targets, stop - start)
