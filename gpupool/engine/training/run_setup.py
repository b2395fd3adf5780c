"""A network made ready to train, as options ask for it. Runs on engines; knows only torch."""

from __future__ import annotations

import torch
from torch import nn

from gpupool.core.options.training_options import TrainingOptions
from gpupool.engine.group.forming import World
from gpupool.engine.numerics.batch_norm import norm_group, plain_batch_norm, sync_batch_norm
from gpupool.engine.numerics.ema import averaged
from gpupool.engine.numerics.optimizers import make_optimizer
from gpupool.engine.training.judge import Judge
from gpupool.engine.training.reports import Ledger
from gpupool.engine.training.run import Run


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
        run.ema = averaged(model, options.ema)
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
        has_own = any(True for _ in module.parameters(recurse=False))
        is_frozen = has_own and not any(p.requires_grad for p in module.parameters())
        if is_frozen or (frozen_norms and isinstance(module, nn.modules.batchnorm._BatchNorm)):
            module.eval()
