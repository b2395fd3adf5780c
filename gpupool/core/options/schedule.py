"""The learning rate of every step in closed form. Pure; runs anywhere.

There is no state: a step's factor follows from its number alone, so a training that is resumed
needs none. Each schedule is that of `torch.optim.lr_scheduler` with `.step()` after every optimizer
step; what they are called there stands beside each.
"""

from __future__ import annotations

import math

from gpupool.core.options.checks import warmup_of
from gpupool.core.options.training_options import TrainingOptions

WARMUP_FACTOR = 0.1
DROP_FACTOR = 0.1


def lr_factor(
    options: TrainingOptions, step: int, steps_per_epoch: int, epoch: int | None = None
) -> float:
    """The factor on `lr` of a step, which counts from 1 over all epochs, as `epoch` does.

    `steps_per_epoch` is 0 where nobody knows; then `check_for` has passed the options.
    """
    # torch's schedulers count the steps that are done, and ours count from 1.
    done = step - 1
    number, unit = (0, "step") if options.warmup is None else warmup_of(options.warmup)
    warmup = number * (steps_per_epoch if unit == "epoch" else 1)
    if done < warmup:  # LinearLR
        return WARMUP_FACTOR + (1 - WARMUP_FACTOR) * done / warmup
    if callable(options.schedule):
        return float(options.schedule(step))
    if options.schedule == "none":
        return 1.0
    # It counts epochs, not steps after the warm-up, so drops stay at the borders of epochs.
    if options.schedule == "piecewise":  # StepLR, once an epoch
        if epoch is None:
            epoch = 1 + done // steps_per_epoch if steps_per_epoch else 1
        drop = DROP_FACTOR if options.drop_factor is None else options.drop_factor
        period = options.drop_period or max(1, options.epochs // 3)
        return float(drop ** ((epoch - 1) // period))
    # The others begin after the warm-up, else the rate would jump where that ends. The lowest
    # factor comes just after the last step, and stays.
    total = total_steps(options, steps_per_epoch) or 0
    share = min(1.0, (done - warmup) / max(1, total - warmup))
    lowest = options.min_factor or 0.0
    if options.schedule == "linear":  # LinearLR
        return lowest + (1 - lowest) * (1 - share)
    return lowest + (1 - lowest) * (1 + math.cos(math.pi * share)) / 2  # CosineAnnealingLR


def total_steps(options: TrainingOptions, steps_per_epoch: int) -> int | None:
    """How many steps training has, if nothing ends it before; None where nobody knows."""
    planned = options.epochs * steps_per_epoch
    if options.max_steps is None:
        return planned or None
    return min(planned, options.max_steps) if planned else options.max_steps
