"""Options of training change what they should, on the very loop that ranks run.

The loop runs here in this process as rank 0 of 1. What only several ranks can show is tested on
pools: exactness, batch norm, clipping, averages, what is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gpupool import TrainingOptions
from gpupool.core.options.schedule import lr_factor, total_steps
from gpupool.core.wire.events import Event, StepEvent, ValidationEvent
from gpupool.engine.group.forming import World
from gpupool.engine.training.loop import fit
from gpupool.engine.training.run import Run
from tests.support.trainings import network, samples, weights

DOUBLE = torch.float64
DATA, HELD_OUT = samples(50, DOUBLE), samples(21, DOUBLE, seed=1)
STEPS = 4  # of an epoch, with the batches of BASE
BASE: dict[str, Any] = {"batch_size": 16, "epochs": 3, "lr": 0.1}


@dataclass
class Seen:
    """What a training has told and left."""

    options: TrainingOptions
    result: Run
    events: list[Event] = field(default_factory=list)

    @property
    def steps(self) -> list[StepEvent]:
        return [event for event in self.events if isinstance(event, StepEvent)]

    @property
    def validations(self) -> list[ValidationEvent]:
        return [event for event in self.events if isinstance(event, ValidationEvent)]

    @property
    def weights(self) -> Tensor:
        return weights(self.result.model)


def trained(
    model: nn.Module | None = None, data: Any = DATA, validation: Any = None, **values: Any
) -> Seen:
    """Train in this process, and see what comes of it."""
    options, told = TrainingOptions(**{**BASE, **values}), list[Event]()
    model, world = model or network(DOUBLE), World(0, 1, torch.device("cpu"))
    with torch.random.fork_rng(devices=[]):
        result = fit(
            model, data, "cross_entropy", options, world=world, validation=validation,
            emit=told.extend,
        )  # fmt: skip
    return Seen(options, result, told)


# options that make other weights: (they, what else both trainings have)
OTHER_WEIGHTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"lr": 0.2}, {}),
    ({"momentum": 0.5}, {}),
    ({"weight_decay": 0.1}, {}),
    ({"weight_decay_factors": {"0.*": 5}}, {"weight_decay": 0.1}),
    ({"learn_rate_factors": {"2.*": 10}}, {}),
    ({"seed": 1}, {}),
    ({"seed": 1}, {"shuffle": "once"}),
    ({"shuffle": "never"}, {}),
    ({"shuffle": "once"}, {}),
    ({"normalize": "fit"}, {}),
    ({"clip": 0.01}, {}),
    ({"ema": 0.5}, {}),
    ({"batch_size": 8}, {}),
    ({"epochs": 2}, {}),
    ({"max_steps": 5}, {}),
]
THE_SAME = [
    ({"weight_decay_factors": {"*": 0}, "weight_decay": 0.1}, {}),
    ({"seed": 1}, {"shuffle": "never"}),
]


@pytest.mark.parametrize(
    ("option", "both", "is_same"),
    [*((*pair, False) for pair in OTHER_WEIGHTS), *((*pair, True) for pair in THE_SAME)],
)
def test_an_option_of_the_step_makes_other_weights(
    option: dict[str, Any], both: dict[str, Any], is_same: bool
) -> None:
    with_it, without = trained(**{**both, **option}), trained(**both)
    assert torch.isfinite(with_it.weights).all()
    assert torch.equal(with_it.weights, without.weights) == is_same


@pytest.mark.parametrize(
    "values",
    [
        {"schedule": "piecewise"},
        {"schedule": "piecewise", "drop_factor": 0.5, "drop_period": 2},
        {"schedule": "linear", "min_factor": 0.1},
        {"schedule": "cosine", "warmup": 5},
        {"schedule": "cosine", "warmup": "1 epoch", "max_steps": 7},
        {"schedule": lambda step: 1 / step},
    ],
)
def test_every_step_has_the_learning_rate_of_the_schedule(values: dict[str, Any]) -> None:
    seen = trained(**values)
    steps = range(1, (total_steps(seen.options, STEPS) or 0) + 1)
    expected = [seen.options.lr * lr_factor(seen.options, step, STEPS) for step in steps]
    assert [step.lr for step in seen.steps] == pytest.approx(expected)
    assert len({step.lr for step in seen.steps}) > 1


def test_convolutions_get_channels_last() -> None:
    images = torch.randn(8, 3, 6, 6, dtype=DOUBLE)
    for value in (False, True):
        layers = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
        model, strides = nn.Sequential(*layers).double(), set[bool]()
        model[0].register_forward_pre_hook(
            lambda _, given, to=strides: to.add(
                given[0].is_contiguous(memory_format=torch.channels_last)
            )
        )
        trained(model, TensorDataset(images, torch.arange(8) % 3), channels_last=value, epochs=1)
        assert strides == {value}


@pytest.mark.parametrize(("every", "at"), [("epoch", [4, 8, 12]), (5, [5, 10, 12])])
def test_validations_come_as_often_as_asked(every: Any, at: list[int]) -> None:
    seen = trained(validation=HELD_OUT, validate_every=every, metrics=["f1", "recall"])
    assert [event.step for event in seen.validations] == at
    assert {*seen.validations[0].metrics} == {"f1", "recall"}
