"""One step of a training, on this rank's share of a global batch. Runs on engines.

The gradient is that of the whole global batch, whatever share each rank has and into however many
micro-batches it is cut. DDP averages over ranks, so each micro-batch's mean loss has the weight
`loss_count * world.size / global_count`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpupool.core.errors import TrainingError
from gpupool.core.options.schedule import lr_factor
from gpupool.data.reading.trees import map_tensors, rows
from gpupool.engine.batches.form import called
from gpupool.engine.batches.gathering import gathered
from gpupool.engine.batches.shares import Share
from gpupool.engine.metrics.evaluation import count_correct
from gpupool.engine.numerics.ddp import StepBuffers, wrap_ddp
from gpupool.engine.numerics.forward import ForwardState, autocast, seed_step
from gpupool.engine.numerics.losses import Loss
from gpupool.engine.probe.rank_report import WorkTimer
from gpupool.engine.training.reports import BatchMetrics
from gpupool.engine.training.run import Run


class TrainingStep:
    """All ranks call it alike. `steps_per_epoch`: for the schedule; 0 for a stream."""

    def __init__(self, run: Run, loss: Loss, steps_per_epoch: int, timer: WorkTimer) -> None:
        self._run, self._loss, self._steps_per_epoch = run, loss, steps_per_epoch
        self._timer = timer
        self._parameters = [p for g in run.optimizer.param_groups for p in g["params"]]
        self.buffers = StepBuffers(run.model, run.world, run.options)
        self.before = ForwardState(run.model)  # as the last complete step has left it
        self._parallel = wrap_ddp(run.model, run.world)
        self._is_ddp_ready = run.world.size == 1

    def run(self, share: Share) -> None:
        """Nothing is read from the device, except in the first step of several ranks, and by fp16
        with an optimizer that is not fused."""
        run = self._run
        options, optimizer, scaler = run.options, run.optimizer, run.scaler
        number = run.step + 1
        self.before.save()  # for an error or interrupt in this step
        if not self._is_ddp_ready:
            self._begin(share)
            self._is_ddp_ready = True

        lr = options.lr * lr_factor(options, number, self._steps_per_epoch, run.epoch)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
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
            run.ema.update_parameters(run.model)
        self.before.forget()
        self._timer.end("optimizer")

        # The step is complete on the host; the device counts it when it is complete there.
        run.completed.add()
        run.step, run.samples_done = number, run.samples_done + share.num_all
        run.reporter.add(number, run.epoch, lr, metrics, share)
        run.is_step_complete = True

    def _forward_and_backward(self, share: Share) -> list[BatchMetrics]:
        """Leave the gradients of the whole global batch in the parameters."""
        run = self._run
        total = self._global_count(share)
        self.buffers.before_forward(share)  # of smaller batches: all take rank 0's statistics
        parts = micro_batches(share, run.options.accumulate, self.buffers.is_synced)
        metrics = []
        for part in parts:
            syncs = part is parts[-1]  # in that one DDP averages the gradients over the ranks
            with nullcontext() if syncs else self._without_sync():
                weighted_loss, of_part = self._forward(part, total)
                if run.scaler is not None:
                    weighted_loss = run.scaler.scale(weighted_loss)
                if syncs and run.world.size > 1:
                    self._timer.begin_backward(weighted_loss)
                weighted_loss.backward()
                self._timer.end_backward()
                metrics.append(of_part)
        self.buffers.after_backward(share)  # where rank 0 had no samples, they are another's
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
        total = world.sum(loss_count)
        return total.where(total > 0, 1)

    def _without_sync(self) -> AbstractContextManager[Any]:
        if isinstance(self._parallel, DistributedDataParallel):
            return self._parallel.no_sync()
        return nullcontext()

    def _forward(self, part: Share, total: int | Tensor) -> tuple[Tensor, BatchMetrics]:
        """What is minimised (summed over parts, averaged over ranks: the loss), and its metrics."""
        run, loss = self._run, self._loss
        inputs, targets, num_here = part.inputs, part.targets, part.num_here
        if run.options.channels_last:
            inputs = map_tensors(_channels_last, inputs)
        norms = self.buffers.batch_norm_context(num_here)
        with autocast(run.world.device, run.options.precision), norms:
            outputs = called(self._parallel, inputs)
            halves = outputs, targets
            if run.options.gather:
                halves = gathered(outputs, targets, num_here, run.world)
            mean_loss = loss.mean(*halves)
        weight: float | Tensor = 1.0
        loss_count: int | Tensor = num_here
        if not run.options.gather:  # else each rank has the loss of the whole batch
            loss_count = loss.num_counted(targets, num_here)
            weight = loss_count * run.world.size / total
        # With even shares it is 1, and a multiplication has to be differentiated too.
        is_one = isinstance(weight, float) and weight == 1.0
        weighted_loss = mean_loss if is_one else mean_loss * weight
        correct = count_correct(loss, outputs, targets, num_here) if num_here else (0, 0)
        return weighted_loss, BatchMetrics(num_here, mean_loss.detach(), loss_count, *correct)

    def _begin(self, share: Share) -> None:
        """Let DDP know the network, before the first step of several ranks; its state stays.

        DDP fails or hangs where a parameter has no part in the loss, unless it looks for such ones
        in each step, which costs time: so one pass without DDP's sums shows whether there are some,
        on any rank. In its first pass with them DDP also lays out its buckets, and the last bit of
        a sum depends on their order: so a training that is resumed makes one such pass more.
        """
        run, used = self._run, set[int]()

        def note(parameter: Tensor) -> None:
            used.add(id(parameter))
            parameter.grad = None  # memory may not do for all gradients beside those of DDP

        trained = [one for one in run.model.parameters() if one.requires_grad]
        hooks = [one.register_post_accumulate_grad_hook(note) for one in trained]
        with self._without_sync():
            self._forward_and_backward(share)
        for hook in hooks:
            hook.remove()
        lacks = torch.tensor(float(len(used) < len(trained)))
        if run.world.sum(lacks.to(run.world.device)).item():
            # Nothing may hold the first wrapper, or its hooks would still take gradients away.
            self._parallel = run.model
            self._parallel = wrap_ddp(run.model, run.world, find_unused=True)
        self.before.restore()
        if run.step:  # resumed
            self._forward_and_backward(share)
            self.before.restore()


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.ndim != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def micro_batches(share: Share, number: int, keep_empty: bool) -> list[Share]:
    """The share in `number` micro-batches: those of the global batch, or of nearly equal size.

    Those without samples are left out, unless `keep_empty`, where every rank must compute as many;
    a placeholder takes their place then. There is always one.
    """
    if number == 1 or (share.num_here == 0 and not keep_empty):
        return [share]
    cuts = [share.num_here * i // number for i in range(number + 1)]
    if len(share.part_sizes) == number and sum(share.part_sizes) == share.num_here:  # none skipped
        cuts = [0, *accumulate(share.part_sizes)]
    return [_cut(share, *cut) for cut in pairwise(cuts) if cut[0] < cut[1] or keep_empty]


def _cut(share: Share, start: int, stop: int) -> Share:
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
    return replace(share, inputs=inputs, targets=targets, num_here=stop - start)
