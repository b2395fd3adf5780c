"""What a training holds while it runs: all that a checkpoint saves, and nothing else.

Runs on engines, also under plain `torchrun`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gpupool.core.network import NetworkInfo
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data.reading.normalization import Normalization
from gpupool.engine.batches.share import Share
from gpupool.engine.group.abort import CompletedSteps
from gpupool.engine.group.forming import World
from gpupool.engine.numerics.batch_norm import plain_batch_norm, sync_batch_norm
from gpupool.engine.numerics.optimizers import make_optimizer
from gpupool.engine.training.early_stopping import EarlyStopping
from gpupool.engine.training.reports import Reporter


@dataclass
class Run:
    """One training, after `step` complete steps. The same on every rank, but for what `world` says.

    A step is complete when the optimizer has made it; nothing here changes before, but for the
    weights themselves while `is_step_complete` is False. Random numbers of a step depend on
    (seed, rank, step) alone, so none are kept.
    """

    world: World
    options: TrainingOptions
    model: nn.Module
    """The network itself, on the rank's device, without a wrapper; in the end with the weights that
    are kept. Its batch norms that are "local" have the statistics of the first rank only there, so
    that is the one whose state is saved. Where that has no samples, those of the first that has."""
    optimizer: torch.optim.Optimizer
    early_stopping: EarlyStopping
    reporter: Reporter
    completed: CompletedSteps
    """Those of this process: a run that is resumed begins with 0."""
    scaler: torch.amp.GradScaler | None = None
    """Of precision "fp16"."""
    ema: AveragedModel | None = None
    """The averaged network, which is the one that is validated and kept."""
    network: NetworkInfo = field(default_factory=NetworkInfo)
    """What the network knows beside its weights."""
    is_step_complete: bool = True
    """False from when the optimizer begins to change weights until the step is complete."""

    step: int = 0
    """Complete steps, over all epochs."""
    epoch: int = 1
    """The present epoch, from 1; after the last one: one more."""
    samples_done: int = 0
    """Samples of this epoch that the complete steps have taken, over all ranks."""
    stopped_by: str = ""
    """Why training ends after this step; "" while it continues. See `EndEvent`."""
    kept: dict[str, Any] = field(default_factory=dict)
    """A state dict, on the CPU: the network after `kept_step`, that of the best validation so far,
    or one whose numbers are all finite; {} if none is kept."""
    kept_step: int = -1

    @property
    def normalization(self) -> Normalization | None:
        """That of the data, or what `normalize="fit"` found."""
        found = self.network.normalization
        return Normalization(*found) if found else None

    def note_inputs(self, share: Share) -> None:
        """Remember the size of the images, of the first batch."""
        inputs, targets = share.inputs, share.targets
        are_images = isinstance(inputs, Tensor) and inputs.ndim == 4
        # A network of maps takes images of any size, and was trained on parts of them.
        is_one_each = isinstance(targets, Tensor) and targets.ndim <= 2
        if are_images and is_one_each and not self.network.input_shape:
            self.network = replace(self.network, input_shape=tuple(inputs.shape[1:]))

    def stop(self, reason: str) -> None:
        """Training ends after this step, unless something else has ended it already."""
        self.stopped_by = self.stopped_by or reason

    @property
    def has_diverged(self) -> bool:
        """Whether training ends because weights or loss are not finite."""
        return self.stopped_by == "diverged"

    @property
    def evaluated(self) -> nn.Module:
        """The network that is validated and kept: the averaged one if there is one."""
        return self.model if self.ema is None else self.ema.module

    @property
    def complete_epoch(self) -> int:
        """The epoch of the last complete step; 0 before the first."""
        if not self.step:
            return 0
        return self.epoch if self.samples_done else self.epoch - 1  # it may be in the next already


def make_run(model: nn.Module, options: TrainingOptions, world: World, reporter: Reporter) -> Run:
    """The run that trains `model`, before its first step; `model` is on the rank's device then."""
    model.to(world.device)
    if options.channels_last:
        model.to(memory_format=torch.channels_last)
    if options.batch_norm == "sync" and world.size > 1:
        sync_batch_norm(model)
    run = Run(
        world=world,
        options=options,
        model=model,
        optimizer=make_optimizer(model, options),
        early_stopping=EarlyStopping(options.objective, options.patience),
        reporter=reporter,
        completed=CompletedSteps(world.device),
    )
    if options.precision == "fp16":
        run.scaler = torch.amp.GradScaler(world.device.type)
    if options.ema is not None:
        # It is only evaluated, so its batch norms need no other rank.
        run.ema = _averaged(model, options.ema)
        plain_batch_norm(run.ema.module)
    if options.compile:  # in place, so that names in the state dict stay; after the copy above
        mode = options.compile if isinstance(options.compile, str) else None
        model.compile(mode=mode)
    return run


def set_training(model: nn.Module, *, frozen_norms: bool = False) -> None:
    """Training mode, but for modules whose parameters are all frozen, and batch norms if asked.

    A frozen batch norm must not drift with the batches that pass through it.
    """
    model.train()
    for module in model.modules():
        # Its own ones alone: a frozen table at the root must not switch off the dropout below it.
        has_own = any(True for _ in module.parameters(recurse=False))
        is_frozen = has_own and not any(p.requires_grad for p in module.parameters())
        if is_frozen or (frozen_norms and isinstance(module, nn.modules.batchnorm._BatchNorm)):
            module.eval()


def _averaged(model: nn.Module, decay: float) -> AveragedModel:
    """A copy of `model`, whose `update_parameters(model)` moves the average on after each step."""
    average = get_ema_multi_avg_fn(decay)

    def averaging(averages: Any, values: Any, num: Any) -> None:
        # torch would cut whole numbers, such as a table of places: 0.9 * 7 + 0.1 * 7 to 6.
        if averages[0].is_floating_point() or averages[0].is_complex():
            average(averages, values, num)
        else:
            torch._foreach_copy_(averages, values)

    return AveragedModel(model, multi_avg_fn=averaging, use_buffers=True)
