"""One optimizer step over the ranks, after another. Runs on engines; knows only torch.

    update = Update(run, loss)
    measured = update.step(share, lr=0.1)    # a list: one for each part of the share

The gradient is that of the whole global batch, whatever the shares, and in however many parts each
is computed: DDP averages over ranks, so every part's mean loss counts what it is a mean over, times
the ranks, over what is counted on all of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from gpupool.core.wire.state_dicts import ExtraState
from gpupool.engine.batches.share import Share
from gpupool.engine.batches.trees import map_tensors
from gpupool.engine.numerics.batch_norm import SyncBatchNorm, counting
from gpupool.engine.numerics.ddp import (
    all_take_part,
    share_statistics,
    share_tensors,
    statistics_rank,
    uncarried_buffers,
    wrapped,
)
from gpupool.engine.numerics.ema import take_in
from gpupool.engine.numerics.forward import Evaluating, ForwardState, autocast
from gpupool.engine.numerics.losses import Loss
from gpupool.engine.numerics.optimizers import clip_gradients, needs_closure, set_learn_rates
from gpupool.engine.probe.rank_report import RankReport
from gpupool.engine.training.run import Run
from gpupool.engine.training.step_sums import Measured, measure


class Update:
    """Makes the steps of a training: the ranks' gradients, averaged, and what becomes of them."""

    def __init__(self, run: Run, loss: Loss, report: RankReport | None = None) -> None:
        self._run, self._loss = run, loss
        self._report = report or RankReport()
        self._parallel = wrapped(run.model, run.world, run.options)
        self._is_first = run.world.size > 1
        self._parameters = [p for g in run.optimizer.param_groups for p in g["params"]]
        modules = list(run.model.modules())
        self._is_synced = any(isinstance(module, SyncBatchNorm) for module in modules)
        self._norms = [module for module in modules if isinstance(module, _BatchNorm)]
        trains_norms = bool(self._norms) and run.options.batch_norm != "frozen"
        self._is_local = trains_norms and not self._is_synced
        self._has_buffers = any(True for _ in run.model.buffers())
        self._has_uncarried = bool(uncarried_buffers(run.model))
        self._first_rank = statistics_rank(run.world, run.options, run.options.batch_size)
        self._before = ForwardState(run.model)
        self._extra = ExtraState(run.model)
        self._averaged_extra = ExtraState(run.evaluated)
        self._is_midway = False
        self._is_short = False  # fewer samples than usual

    def step(self, share: Share, lr: float) -> list[Measured]:
        """Take this rank's part in one step; gives what was measured of each part of the share.

        Nothing is read from the device, but what the optimizer itself reads.
        """
        run = self._run
        set_learn_rates(run.optimizer, lr)
        if run.options.checkpoint is not None:
            self._before.note()
            self._is_midway = True
        if needs_closure(run.optimizer):
            return self._step_by_closure(share)
        measured = self._gradients(share)
        self._clip()
        run.begin_change()
        if run.scaler is None:
            run.optimizer.step()
        else:
            run.scaler.step(run.optimizer)
            run.scaler.update()
        self._average()
        self._is_midway = False
        return measured

    def undo(self) -> None:
        """After an error: put back what a step has changed that did not become complete."""
        if self._is_midway:
            self._before.put_back()

    def warm_up(self, share: Share) -> None:
        """Let DDP lay out its gradients as it does in the first step, and change nothing else.

        The order in which ranks add up, and so the last bit of a sum, depends on that layout. A
        training that goes on from a checkpoint has then the sums of one that was never interrupted.
        """
        if self._run.world.size > 1:
            self._before.note()
            self._gradients(share)
            self._before.put_back()
            self._run.optimizer.zero_grad(set_to_none=True)

    def _average(self) -> None:
        """Take the new weights into their average; what is no tensor is the newest there too."""
        if self._run.ema is not None:
            take_in(self._run.ema, self._run.model)
            self._averaged_extra.put_back(self._extra.note())

    # ---- the gradient of the global batch -------------------------------------------------------

    def _gradients(self, share: Share) -> list[Measured]:
        """Leave the gradients of the whole global batch in the parameters."""
        run = self._run
        seed_step(run.options.seed, run.world.rank, run.step + 1, run.world.device)
        run.optimizer.zero_grad(set_to_none=True)
        num_all = self._num_in_all(share)
        is_smaller = share.num_all < run.options.batch_size
        self._is_short = is_smaller or bool(share.skipped)
        self._share_buffers(may_be_single=is_smaller or run.options.on_error == "skip")
        parts = parts_of(share, run.options.accumulate, keep_empty=self._is_synced)
        measured = []
        for part in parts[:-1]:
            with self._without_sync():
                measured.append(self._backward(*self._forward(part, num_all)))
        last = self._first_forward if self._is_first else self._forward
        measured.append(self._last_backward(*last(parts[-1], num_all)))
        first = self._first_rank
        if is_smaller:
            first = statistics_rank(run.world, run.options, share.num_all)
        if first and self._has_buffers:  # rank 0, whose buffers are saved, has no samples
            share_statistics(run.model, run.world, first)
        return measured

    def _share_buffers(self, *, may_be_single: bool) -> None:
        """Make the first rank's what this step depends on, where DDP does not.

        A single sample is normalised with the statistics so far: by those that a checkpoint has,
        or a training that goes on would be another one. Which share skipping has left with one,
        its own rank alone knows.
        """
        run = self._run
        if self._has_uncarried:
            share_tensors(uncarried_buffers(run.model), run.world)
        if self._is_local and may_be_single:
            kept = [one for norm in self._norms for one in norm.buffers(recurse=False)]
            share_tensors(kept, run.world)

    def _backward(self, objective: Tensor, measured: Measured) -> Measured:
        """Add the gradient of a part."""
        self._scaled(objective).backward()
        return measured

    def _last_backward(self, objective: Tensor, measured: Measured) -> Measured:
        """As `_backward`; in this one ranks wait for each other."""
        objective = self._scaled(objective)
        if self._run.world.size > 1:
            self._report.watch(objective)
        objective.backward()
        self._report.waited()
        return measured

    def _scaled(self, objective: Tensor) -> Tensor:
        scaler = self._run.scaler
        return objective if scaler is None else scaler.scale(objective)

    def _first_forward(self, part: Part, num_all: int | Tensor) -> tuple[Tensor, Measured]:
        """As `_forward`, and see whether each parameter has a part in the loss, on every rank.

        DDP would wait for the gradients of the others for ever, so it is told to look for them.
        """
        self._is_first = False
        run = self._run
        before = ForwardState(run.model)  # what is noted already is of the step's begin
        before.note()
        objective, measured = self._forward(part, num_all)
        lacks = float(not all_take_part(objective, self._parameters))
        if run.world.sum(torch.tensor(lacks, device=run.world.device)).item():
            before.put_back()
            self._parallel = run.model  # and no longer the wrapper, which ends
            del objective, measured
            self._parallel = wrapped(run.model, run.world, run.options, find_unused=True)
            objective, measured = self._forward(part, num_all)
        return objective, measured

    def _forward(self, part: Part, num_all: int | Tensor) -> tuple[Tensor, Measured]:
        """What is minimised, so that its average over ranks is the loss, and what is measured."""
        run, inputs = self._run, part.inputs
        if run.options.channels_last:
            inputs = map_tensors(_channels_last, inputs)
        with autocast(run.world.device, run.options.precision), self._counted(part.num_here):
            outputs = self._parallel(inputs)
            mean_loss = self._loss(outputs, part.targets)
        counted = self._loss.num_counted(part.targets, part.num_here)
        if not part.num_here:
            counted = counted * 0
        weight = counted * run.world.size / num_all
        # With even shares it is 1, and a multiplication has to be differentiated too.
        is_one = isinstance(weight, float) and weight == 1.0
        objective = mean_loss if is_one else mean_loss * weight
        if objective.ndim:
            objective = objective.sum()
        return objective, measure(
            self._loss, mean_loss, counted, outputs, part.targets, part.num_here
        )

    def _num_in_all(self, share: Share) -> int | Tensor:
        """What the loss is a mean over, of the whole global batch.

        Where only the data tell, it is summed over the ranks, and not read from the device: no rank
        waits for it. If nothing is left, every rank's loss counts nothing.
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

    # ---- what surrounds it ----------------------------------------------------------------------

    def _without_sync(self) -> AbstractContextManager[Any]:
        if isinstance(self._parallel, DistributedDataParallel):
            return self._parallel.no_sync()
        return nullcontext()

    def _counted(self, num_here: int) -> AbstractContextManager[Any]:
        """A stand-in leaves no trace in batch norms; a single sample none where it is one value."""
        if num_here > 1 or not self._norms:
            return nullcontext()
        if self._is_synced:
            return counting(num_here > 0)
        if num_here and not self._is_short:  # it would be so in every step, so torch's error is due
            return nullcontext()
        return Evaluating(self._norms, only_single=num_here == 1)

    def _clip(self) -> None:
        options, scaler = self._run.options, self._run.scaler
        if options.clip is None:
            return
        if scaler is not None:
            scaler.unscale_(self._run.optimizer)
        clip_gradients(self._parameters, options.clip, options.clip_method)

    def _step_by_closure(self, share: Share) -> list[Measured]:
        """A step of an optimizer that asks for loss and gradient as often as it wants.

        All ranks give it the same numbers, so that it does the same everywhere.
        """
        first: list[Measured] = []

        def closure() -> float:
            run = self._run
            measured = self._gradients(share)
            self._clip()
            num_all = torch.as_tensor(self._num_in_all(share), dtype=torch.float64)
            total = torch.stack([(one.mean_loss * one.counted).double() for one in measured])
            first[:] = first or measured
            return float((run.world.sum(total.sum(0)) / num_all.to(total.device)).sum().item())

        self._run.is_whole = False  # an interrupt may leave half a step: it may compute for long
        self._run.optimizer.step(closure)
        self._average()
        self._is_midway = False
        return first


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.ndim != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


_MASK = 2**64 - 1


def seed_step(seed: int, rank: int, step: int, device: torch.device) -> None:
    """Set torch's generators, of the CPU and of `device`, to what (seed, rank, step) say.

    So a training that goes on after a checkpoint draws what it would have drawn without one.
    """
    key = step_key(seed, rank, step)
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)


def step_key(seed: int, rank: int, step: int) -> int:
    """A number in 0..2**64-1, by SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable
    pseudorandom number generators", doi 10.1145/2660193.2660195).

    Its lower half is as good: torch's generator of the CPU takes no more.
    """
    key = seed
    for part in (rank, step):
        key = _mixed((key + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK)
    return key


def _mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Part(NamedTuple):
    """Some samples of a share; `num_here` 0: a stand-in that counts nothing."""

    inputs: Any
    targets: Any
    num_here: int


def parts_of(share: Share, number: int, *, keep_empty: bool) -> list[Part]:
    """The share in `number` parts, in order: those of the global batch, or of nearly equal size.

    Parts without samples are left out, unless `keep_empty`, where every rank must compute as many;
    a stand-in takes their place then. There is always one part.
    """
    if number == 1 or (share.num_here == 0 and not keep_empty):
        return [Part(share.inputs, share.targets, share.num_here)]
    cuts = [share.num_here * i // number for i in range(number + 1)]
    if len(share.part_sizes) == number and sum(share.part_sizes) == share.num_here:  # none skipped
        cuts = [0, *accumulate(share.part_sizes)]
    pieces = [cut for cut in pairwise(cuts) if cut[0] < cut[1] or keep_empty]
    return [_cut(share, *cut) if cut[0] < cut[1] else _stand_in(share) for cut in pieces]


def _cut(share: Share, start: int, stop: int) -> Part:
    inputs = map_tensors(lambda tensor: tensor[start:stop], share.inputs)
    targets = map_tensors(lambda tensor: tensor[start:stop], share.targets)
    return Part(inputs, targets, stop - start)


def _stand_in(share: Share) -> Part:
    return _cut(share, 0, 1)._replace(num_here=0)
