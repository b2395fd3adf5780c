"""What a training holds while it runs: all that a checkpoint saves; and which weights it leaves.

Runs on engines, also under plain `torchrun`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gpupool.core.errors import OptionsError
from gpupool.core.network import NetworkInfo
from gpupool.core.options.named_measures import less_is_better
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.events import ValidationEvent, WarningEvent
from gpupool.core.wire.state_dicts import load
from gpupool.engine.batches.shares import Share
from gpupool.engine.checkpoint.weights import copied
from gpupool.engine.group.abort import CompletedSteps
from gpupool.engine.group.forming import World
from gpupool.engine.numerics.batch_norm import plain_batch_norm, sync_batch_norm
from gpupool.engine.numerics.optimizers import make_optimizer
from gpupool.engine.training.reports import Reporter


@dataclass
class Run:
    """One training, after `step` complete steps. The same on every rank, but for what `world` says.

    Nothing here changes before a step is complete, but for the weights. Random numbers of a step
    depend on (seed, rank, step) alone, so none are kept.
    """

    world: World
    options: TrainingOptions
    model: nn.Module
    """The network itself, on the rank's device, without a wrapper; in the end with the weights that
    are kept. Its batch norms that are "local" have the statistics of the first rank only there, so
    that is the one whose state is saved. Where that has no samples, those of the first that has."""
    optimizer: torch.optim.Optimizer
    reporter: Reporter
    completed: CompletedSteps
    """Those of this process: a run that is resumed begins with 0."""
    scaler: torch.amp.GradScaler | None = None
    ema: AveragedModel | None = None
    """The averaged network, which is the one that is validated and kept."""
    network: NetworkInfo = field(default_factory=NetworkInfo)
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
    best: dict[str, float] = field(default_factory=dict)
    """The values of the best validation so far; {} before the first that is no NaN."""
    num_worse: int = 0
    """Validations since then."""
    kept: dict[str, Any] = field(default_factory=dict)
    """A state dict, on the CPU: the network after `kept_step`; {} if none is kept."""
    kept_step: int = -1
    finite: tuple[dict[str, Any], int] = field(default_factory=lambda: ({}, 0))
    """As `kept`, and the step: what is left where a NaN ends training."""

    def note_inputs(self, share: Share) -> None:
        inputs, targets = share.inputs, share.targets
        are_images = isinstance(inputs, Tensor) and inputs.ndim == 4
        # A network of maps takes images of any size, and was trained on parts of them.
        is_one_each = isinstance(targets, Tensor) and targets.ndim <= 2
        if are_images and is_one_each and not self.network.input_shape:
            self.network = replace(self.network, input_shape=tuple(inputs.shape[1:]))

    def stop(self, reason: str) -> None:
        """Training ends after this step, unless something else has ended it already."""
        self.stopped_by = self.stopped_by or reason

    def add_validation(self, event: ValidationEvent) -> ValidationEvent:
        """The event, which says whether it is the best one. Raises OptionsError, on every rank, if
        it lacks what the objective is."""
        objective = self.options.objective
        accuracy = {} if event.accuracy is None else {"accuracy": event.accuracy}
        values = {"loss": event.loss, **event.metrics, **accuracy}
        if objective not in values:
            raise OptionsError(
                f"objective={objective!r} is not among what a validation gives here: "
                f"{', '.join(values)}. Name it in metrics, or choose one of these."
            )
        if not is_better(objective, values[objective], self.best.get(objective, math.nan)):
            self.num_worse += 1
            return event
        self.best, self.num_worse = values, 0
        if self.options.keep == "best":
            self.kept, self.kept_step = copied(self.evaluated.state_dict()), event.step
        return replace(event, is_best=True)

    def check_finite(self, *, keeps: bool = False) -> bool:
        """Whether training may continue from these weights; if they are not finite, it ends."""
        if self.has_diverged:
            return False
        # Frozen ones do not change: a mask of -inf among them is no divergence.
        trained = [one for one in self.model.parameters() if one.requires_grad]
        if not torch.stack([one.isfinite().all() for one in trained]).all():
            self.diverge("Weights", self.step)
        elif keeps and self.kept_step == self.step:  # one copy serves both
            self.finite = self.kept, self.step
        elif keeps:
            self.keep_finite()
        return not self.has_diverged

    def keep_finite(self) -> None:
        self.finite = copied(self.evaluated.state_dict()), self.step

    def diverge(self, what: str, step: int) -> None:
        """Training ends, whatever else ends it: loss or weights are NaN or infinite."""
        said = f"{what} became NaN or infinite by step {step}: training diverged."
        said += " Try a smaller lr, warmup= or clip=."
        self.reporter.emit(WarningEvent(said, step))
        self.stopped_by = "diverged"

    def leave_weights(self) -> None:
        """Give the network what `options.keep` asks for: the best weights so far, or the last; of a
        training that has diverged, the last ones that were finite."""
        finite, step = self.finite
        if self.options.keep == "best" and self.kept:
            load(self.model, self.kept)
        elif self.has_diverged and finite:
            load(self.model, finite)
            self.kept_step = step
        elif self.ema is not None:
            load(self.model, self.ema.module.state_dict())
        plain_batch_norm(self.model).eval()

    @property
    def is_patience_over(self) -> bool:
        patience = self.options.patience
        return patience is not None and self.num_worse >= patience

    @property
    def has_diverged(self) -> bool:
        return self.stopped_by == "diverged"

    @property
    def evaluated(self) -> nn.Module:
        return self.model if self.ema is None else self.ema.module

    @property
    def complete_epoch(self) -> int:
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
        model.compile()
    return run


def set_training(model: nn.Module, *, frozen_norms: bool = False) -> None:
    """Training mode, but for modules whose parameters are all frozen, and batch norms if asked:
    these must not drift with the batches that pass through them."""
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


def is_better(objective: str, new: float, old: float) -> bool:
    """Whether a value of a validation is; NaN never is, and any number is better than NaN."""
    if math.isnan(new) or math.isnan(old):
        return not math.isnan(new)
    return new < old if less_is_better(objective) else new > old
