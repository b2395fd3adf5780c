"""Each schedule against torch's scheduler of that kind, over whole trainings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_lr

from gpupool.core.options.schedule import lr_factor, total_steps
from gpupool.core.options.training_options import TrainingOptions, check_for

LR = 0.5
SPE = 7  # steps per epoch

Make = Callable[[torch.optim.Optimizer], torch_lr.LRScheduler]


def torch_rates(make: Make, num_steps: int, every: int = 1) -> list[float]:
    """The learning rates of a real optimizer whose scheduler steps after each `every` steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = make(optimizer)
    rates = []
    for step in range(1, num_steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step % every == 0:
            with warnings.catch_warnings():  # SequentialLR calls what it deprecates
                warnings.simplefilter("ignore")
                scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("values", "make", "every"),
    [
        ({}, lambda o: torch_lr.ConstantLR(o, factor=1), 1),
        (
            {"schedule": "piecewise", "drop_factor": 0.3, "drop_period": 4},
            lambda o: torch_lr.StepLR(o, 4, gamma=0.3),
            SPE,
        ),
        ({"schedule": "piecewise"}, lambda o: torch_lr.StepLR(o, 4, gamma=0.1), SPE),
        ({"schedule": "linear"}, lambda o: torch_lr.LinearLR(o, 1, 0, total_iters=12 * SPE), 1),
        (
            {"schedule": "cosine", "min_factor": 0.05},
            lambda o: torch_lr.CosineAnnealingLR(o, T_max=12 * SPE, eta_min=0.05 * LR),
            1,
        ),
        (
            {"schedule": "cosine", "warmup": "2 epochs"},
            lambda o: torch_lr.SequentialLR(
                o,
                [
                    torch_lr.LinearLR(o, start_factor=0.1, total_iters=2 * SPE),
                    torch_lr.CosineAnnealingLR(o, T_max=10 * SPE),
                ],
                [2 * SPE],
            ),
            1,
        ),
    ],
)
def test_a_schedule_is_that_of_torch(values: dict[str, Any], make: Make, every: int) -> None:
    options = TrainingOptions(lr=LR, epochs=12, **values)
    ours = [LR * lr_factor(options, step, SPE) for step in range(1, 12 * SPE + 1)]
    assert ours == pytest.approx(torch_rates(make, 12 * SPE, every), rel=1e-9, abs=1e-12)


def test_what_ends_the_curve_earlier_and_what_is_asked_for_every_step() -> None:
    options = TrainingOptions(schedule="linear", max_steps=20)
    assert total_steps(options, SPE) == 20
    assert lr_factor(options, 20, SPE) == pytest.approx(1 / 20)
    options = TrainingOptions(schedule=lambda step: 1 / step, warmup=2)
    assert [lr_factor(options, step, 3) for step in (2, 3, 4)] == pytest.approx([0.55, 1 / 3, 0.25])


def test_of_a_stream_only_what_needs_no_length_can_be_had() -> None:
    drops = TrainingOptions(schedule="piecewise", epochs=4, drop_period=2, warmup=9)
    assert [lr_factor(drops, 99, 0, epoch) for epoch in (1, 2, 3)] == pytest.approx([1, 1, 0.1])
    line = TrainingOptions(schedule="linear", max_steps=10, warmup="2 steps")
    assert lr_factor(line, 7, 0, 1) == pytest.approx(0.5)
    assert total_steps(TrainingOptions(), 0) is None
    for options in (drops, line):
        check_for(options, has_validation=True, num_samples=None)
