"""A network made ready to train, as options ask for it. Runs on engines; knows only torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gpupool.core.training_options import TrainingOptions
from gpupool.engine.batch_norm import norm_group, plain_batch_norm, sync_batch_norm
from gpupool.engine.group import World
from gpupool.engine.judge import Judge
from gpupool.engine.ledger import Ledger
from gpupool.engine.optimizers import make_optimizer
from gpupool.engine.running import Run

_Tensors = tuple[Tensor, ...] | list[Tensor]


def make_run(model: nn.Module, options: TrainingOptions, world: World, ledger: Ledger) -> Run:
    """The run that trains `model`, before its first step; `model` is on the rank's device then."""
    model.to(world.device)
    if options.channels_last:
        model.to(memory_format=torch.channels_last)
    if options.batch_norm == "sync" and world.size > 1:
        sync_batch_norm(model, norm_group(world))
    run = Run(
        world=world,
        options=options,
        model=model,
        optimizer=make_optimizer(model, options),
        judge=Judge(options.objective, options.patience),
        ledger=ledger,
    )
    if options.precision == "fp16":
        run.scaler = torch.amp.GradScaler(world.device.type)
    if options.ema is not None:
        average = _averaging(options.ema)
        run.ema = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
        plain_batch_norm(run.ema.module)
    if options.compile:  # in place, so that names in the state dict stay; after the copy above
        mode = options.compile if isinstance(options.compile, str) else None
        model.compile(mode=mode)
    return run


def _averaging(decay: float) -> Callable[[_Tensors, _Tensors, Tensor | int], None]:
    """torch's exponential average of numbers; whole numbers, such as a table of places, as is."""
    average = get_ema_multi_avg_fn(decay)

    def averaged(averages: _Tensors, values: _Tensors, num: Tensor | int) -> None:
        if averages[0].is_floating_point() or averages[0].is_complex():
            average(averages, values, num)
        else:
            torch._foreach_copy_(averages, values)

    return averaged


def set_training(model: nn.Module, *, frozen_norms: bool = False) -> None:
    """Training mode, but for modules whose parameters are all frozen, and batch norms if asked.

    A frozen batch norm must not drift with the batches that pass through it.
    """
    model.train()
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        is_frozen = bool(own) and not any(p.requires_grad for p in own)
        if is_frozen or (frozen_norms and isinstance(module, nn.modules.batchnorm._BatchNorm)):
            module.eval()
