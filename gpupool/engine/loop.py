"""The training loop, top to bottom. Runs on engines; under plain `torchrun` too; knows only torch.

Every rank walks through the same global batches and computes its share of each. The loss is
weighted so that the gradients are those of one process with the whole batch, whatever the shares:
DDP averages over ranks, so a rank's mean loss counts (samples here) * (ranks) / (samples in all);
of masks, the pixels that have a class are counted instead. Samples that cannot be read and may be
skipped count nowhere, and change no number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpupool.core.errors import OptionsError, TrainingError
from gpupool.core.events import Event
from gpupool.core.options import TrainingOptions
from gpupool.data import shards
from gpupool.data.samples import Draw, Skipped
from gpupool.engine.batches import Dataset, epoch_batches, load_shares, loss_weight
from gpupool.engine.group import World
from gpupool.engine.ledger import NUM_MEASURED, Ledger, measure
from gpupool.engine.losses import LOSSES, LossFunction, num_counted


def fit(
    model: nn.Module,
    dataset: Dataset,
    loss: str | LossFunction,
    options: TrainingOptions,
    *,
    world: World,
    validation: Dataset | None = None,
    emit: Callable[[Sequence[Event]], None] = lambda events: None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> nn.Module:
    """Train `model` in place on every rank's device and return it.

    Args:
        loss: a name in `LOSSES`, or a callable (outputs, targets) -> mean loss over the samples.
        emit: is given the events of the first rank; the other ranks emit nothing.
        stop_requested: asked every `log_every` steps; true on any rank ends training on all,
            after the same step.
    """
    torch.manual_seed(options.seed + world.rank)
    compute_loss = LOSSES[loss] if isinstance(loss, str) else loss
    model.to(world.device)
    optimizer = make_optimizer(model, options)
    parallel = (
        DistributedDataParallel(model, process_group=world.group) if world.size > 1 else model
    )

    steps_per_epoch = shards.num_batches(len(dataset), options.batch_size)
    ledger = Ledger(world, emit, stop_requested)
    ledger.start(dataset, options, steps_per_epoch)
    skip = options.on_error == "skip"
    step = 0
    for epoch in range(1, options.epochs + 1):
        _set_training(model)
        ledger.begin_epoch(epoch, dataset, options)
        batches, draw = epoch_batches(dataset, options, epoch), Draw(options.seed, epoch)
        # Held by nothing but the loop: so its threads end with it, also where a traceback stays.
        for number, share in enumerate(
            load_shares(dataset, batches, world, draw, skip=skip), start=1
        ):
            # ---- one step: this rank's share of one global batch
            outputs = parallel(share.inputs)
            mean_loss = compute_loss(outputs, share.targets)
            counted = num_counted(compute_loss, share)
            weight = loss_weight(share, world, counted, skip=skip)
            optimizer.zero_grad(set_to_none=True)
            (mean_loss * weight).backward()
            optimizer.step()
            step += 1
            # ---- its report: kept on the device, summed over the ranks every few steps
            measured = measure(mean_loss, counted, outputs, share)
            ledger.add(step, epoch, options.lr, measured, share)
            if number % options.log_every == 0 or number == steps_per_epoch:
                ledger.flush()
            if ledger.stopped:
                break
        if ledger.stopped:
            break
        ledger.end_epoch()
        if validation is not None:
            ledger.begin_validation(epoch, validation, options)
            totals, skipped = evaluate(parallel, validation, compute_loss, world, options)
            ledger.validation(step, epoch, totals, skipped)
    ledger.end(step)
    return model


def evaluate(
    model: nn.Module,
    dataset: Dataset,
    compute_loss: LossFunction,
    world: World,
    options: TrainingOptions,
) -> tuple[Tensor, list[Skipped]]:
    """What this rank's shares of `dataset` give: `measure` summed over them, and what they lack."""
    model.eval()
    totals = torch.zeros(NUM_MEASURED, dtype=torch.float64, device=world.device)
    skipped: list[Skipped] = []
    batches = epoch_batches(dataset, replace(options, shuffle="never"), 1)
    # The same random numbers after every epoch, should its transform draw any.
    draw, skip = Draw(options.seed, 0), options.on_error == "skip"
    with torch.no_grad():
        for share in load_shares(dataset, batches, world, draw, skip=skip):
            skipped += share.skipped
            if share.num_here:
                outputs = _unwrapped(model)(share.inputs)
                mean_loss = compute_loss(outputs, share.targets)
                totals += measure(mean_loss, num_counted(compute_loss, share), outputs, share)
    return totals, skipped


# ---- model and optimizer ---------------------------------------------------------------------


def make_optimizer(model: nn.Module, options: TrainingOptions) -> torch.optim.Optimizer:
    """The optimizer over the parameters that train, grouped by learn-rate factor.

    Parameters with factor 0 are frozen (`requires_grad` off).

    Raises:
        OptionsError: a pattern in `learn_rate_factors` that matches no parameter.
    """
    groups: dict[float, list[nn.Parameter]] = {}
    factors = parameter_factors([n for n, _ in model.named_parameters()], options)
    for name, parameter in model.named_parameters():
        if factors[name] == 0:
            parameter.requires_grad_(False)
        elif parameter.requires_grad:
            groups.setdefault(factors[name], []).append(parameter)
    if not groups:
        raise TrainingError(
            "the model has no parameter that trains: all are frozen, or it has none."
        )
    settings = [{"params": p, "lr": options.lr * factor} for factor, p in groups.items()]
    decay = options.weight_decay
    match options.optimizer:
        case "sgdm":
            momentum = 0.9 if options.momentum is None else options.momentum
            return torch.optim.SGD(settings, options.lr, momentum=momentum, weight_decay=decay)
        case "rmsprop":
            momentum = options.momentum or 0.0
            return torch.optim.RMSprop(settings, options.lr, momentum=momentum, weight_decay=decay)
        case "adam":
            return torch.optim.Adam(settings, options.lr, weight_decay=decay)
        case _:
            return torch.optim.AdamW(settings, options.lr, weight_decay=decay)


def parameter_factors(names: Sequence[str], options: TrainingOptions) -> dict[str, float]:
    """Learn-rate factor of each parameter by name: the last matching pattern counts, else 1."""
    factors = dict.fromkeys(names, 1.0)
    for pattern, factor in options.learn_rate_factors.items():
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise OptionsError(
                f"learn_rate_factors: {pattern!r} matches no parameter. The model has: "
                f"{', '.join(names[:4])}, ... {', '.join(names[-2:])}."
            )
        factors.update(dict.fromkeys(matched, float(factor)))
    return factors


def _set_training(model: nn.Module) -> None:
    """Training mode, but for modules whose parameters are all frozen.

    A frozen batch norm must not drift with the batches that pass through it.
    """
    model.train()
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and not any(p.requires_grad for p in own):
            module.eval()


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DDP: its forward makes no collective, so ranks may differ in batches."""
    return model.module if isinstance(model, DistributedDataParallel) else model
