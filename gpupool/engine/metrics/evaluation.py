"""Loss, accuracy and metrics of a network on a data set. Runs on engines; knows only torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpupool.core.network import Scaling
from gpupool.core.options.datasets import NO_CLASS, in_order
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import Progress
from gpupool.data.reading.samples import Draw, Skipped
from gpupool.engine.batches.form import BatchForm, called
from gpupool.engine.batches.gathering import gathered
from gpupool.engine.batches.shares import Dataset, Share, epoch_shares
from gpupool.engine.group.forming import World
from gpupool.engine.metrics.metrics import Metrics
from gpupool.engine.numerics.forward import autocast
from gpupool.engine.numerics.losses import Loss, fits_first


def each_share(
    model: nn.Module,
    dataset: Dataset,
    world: World,
    options: TrainingOptions,
    use: Callable[[Any, Share], object],
    bar: Progress,
    normalization: Scaling | None,
    form: BatchForm,
) -> None:
    """Call `use` with what the network gives for this rank's share of each batch, and the share.

    All samples come once, in order, and the network is in evaluation mode. What it gives for an
    empty share is None. `bar` counts the samples of all ranks.
    """
    model.eval()
    # The same random numbers after every epoch, should its transform draw any.
    draw, options = Draw(options.seed, 0), in_order(options)
    shares = epoch_shares(
        dataset, options, world, 1, draw=draw, normalization=normalization, form=form
    )
    with torch.no_grad():
        for share in shares:
            outputs = None
            # With `gather` every rank computes the loss of all, also one without samples.
            if share.num_here or options.gather:
                with autocast(world.device, options.precision):
                    outputs = called(model, share.inputs)
            use(outputs, share)
            bar.advance(share.num_all)
            bar.tick()


class Evaluation:
    """What the shares of a data set give; `skipped` is what this rank's lack."""

    def __init__(
        self, loss: Loss, world: World, options: TrainingOptions, metrics: Metrics
    ) -> None:
        self._loss, self._world, self._options, self._metrics = loss, world, options, metrics
        metrics.reset()
        # Of the loss and of what is right each a sum, and over how much it is; samples.
        self._sums = torch.zeros(5, dtype=torch.float64, device=world.device)
        self.skipped: list[Skipped] = []

    def add(self, outputs: Any, share: Share) -> None:
        self.skipped += share.skipped
        gathers, num, targets = self._options.gather, share.num_here, share.targets
        if not (num or gathers):
            return
        with autocast(self._world.device, self._options.precision):
            of_all = gathered(outputs, targets, num, self._world) if gathers else (outputs, targets)
            mean_loss = self._loss.mean(*of_all)
        if num:
            count = num if gathers else self._loss.num_counted(targets, num)
            correct = count_correct(self._loss, outputs, targets, num)
            # A number of Python is multiplied there: its copy would wait for what is queued.
            one = self._sums.new_ones(())
            numbers = mean_loss.double() * count, count, *correct, num
            self._sums += torch.stack([one * number for number in numbers])
            self._metrics.update(outputs, targets)

    def values(self) -> tuple[float, float | None, int, dict[str, float]]:
        """Loss, accuracy (0..1; None where nothing has a class), number of samples and metrics, of
        all ranks: every rank must call it, and gets the same."""
        total, count, right, labeled, num = self._world.sum(self._sums).tolist()
        loss = quotient(total, count)
        metrics = self._metrics.compute(self._world)
        return math.nan if loss is None else loss, quotient(right, labeled), int(num), metrics


def count_correct(
    loss: Loss, outputs: Any, targets: Any, num_here: int
) -> tuple[int | Tensor, int | Tensor]:
    """How many samples (or pixels) have their class right, and how many have one; 0 of 0 where
    outputs are not (N, C, ...) and targets integers (N, ...). Nothing is read from the device."""
    outputs, targets = loss.scored(outputs, targets)
    are_tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    if not are_tensors or targets.is_floating_point() or not fits_first(outputs, targets):
        return 0, 0
    is_right = outputs.detach().argmax(1) == targets
    if targets.ndim == 1 and loss.ignored == NO_CLASS:  # as such a loss is over all samples
        return is_right.sum(), num_here
    counts = targets != loss.ignored
    return (is_right & counts).sum(), counts.sum()


def quotient(total: float, count: float) -> float | None:
    return total / count if count else None
