"""Options of training change what they should, on the very loop that ranks run.

The loop runs here in this process as rank 0 of 1. What only several ranks can show is tested on
pools: exactness, orders, batch norm, clipping, averages, what is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gpupool import SpmdError, TrainingError, TrainingOptions
from gpupool.core.machine.topology import Gpu, Rank
from gpupool.core.options.schedule import lr_factor, total_steps
from gpupool.core.wire.events import Event, ResumeEvent, StepEvent, ValidationEvent
from gpupool.engine.group.forming import World
from gpupool.engine.training.loop import fit
from gpupool.engine.training.run import Run, is_better
from gpupool.pool.launchers.processes import engine_environment
from tests.support.pools import Pools
from tests.support.trainings import network, samples, train_on, weights

DOUBLE = torch.float64
DATA, HELD_OUT = samples(50, DOUBLE), samples(21, DOUBLE, seed=1)
STEPS = 4  # of an epoch, with the batches of BASE
BASE: dict[str, Any] = {"batch_size": 16, "epochs": 3, "lr": 0.1}


@dataclass
class Seen:
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
    options, told = TrainingOptions(**{**BASE, **values}), list[Event]()
    model, world = model or network(DOUBLE), World(0, 1, torch.device("cpu"))
    with torch.random.fork_rng(devices=[]):
        result = fit(
            model, data, "cross_entropy", options, world=world, validation=validation,
            emit=told.extend,
        )  # fmt: skip
    return Seen(options, result, told)


@pytest.mark.parametrize(
    ("option", "both", "is_same"),
    [
        ({"momentum": 0.5}, {}, False),
        ({"weight_decay_factors": {"0.*": 5}}, {"weight_decay": 0.1}, False),
        ({"weight_decay_factors": {"*": 0}, "weight_decay": 0.1}, {}, True),
        ({"learn_rate_factors": {"2.*": 10}}, {}, False),
        ({"seed": 1}, {}, False),
        ({"seed": 1}, {"shuffle": "once"}, False),
        ({"seed": 1}, {"shuffle": "never"}, True),
    ],
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
        {"schedule": "piecewise", "drop_factor": 0.5, "drop_period": 2},
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


@pytest.mark.parametrize(
    ("objective", "is_less"),
    [("loss", True), ("val_loss", True), ("rmse", True), ("accuracy", False), ("mean_iou", False)],
)
def test_the_best_is_the_least_or_the_most_by_name(objective: str, is_less: bool) -> None:
    assert is_better(objective, 0.4, 0.5) == is_less
    assert is_better(objective, 0.5, 0.4) != is_less
    assert not is_better(objective, 0.4, 0.4)
    assert is_better(objective, 0.4, math.nan)
    assert not is_better(objective, math.nan, 0.4)


def test_patience_counts_validations_in_a_row_over_a_resume_too(tmp_path: Path) -> None:
    def validated(scores: list[float], **more: Any) -> tuple[list[bool], str]:
        given = iter(scores)

        def score(outputs: Tensor, targets: Tensor) -> float:
            return next(given)

        settings = {"metrics": [score], "objective": "score", "patience": 2, "batch_size": 50}
        seen = trained(validation=HELD_OUT, **settings, **more)
        return [event.is_best for event in seen.validations], seen.result.stopped_by

    is_best = [True, False, True, False, False]
    assert validated([1.0, 0.9, 1.1, 1.0, 1.1], epochs=9) == (is_best, "patience")
    saved = {"checkpoint": str(tmp_path), "resume": "auto"}
    assert validated([1.0, 0.9, 1.1, 1.0], epochs=4, **saved) == (is_best[:4], "epochs")
    assert validated([1.1], epochs=9, **saved) == (is_best, "patience")


# ---- deterministic=True: what it sets on ranks, and puts back ------------------------------------


def settings() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark


def note(info: Any) -> None:
    if info.event == "end":
        print(settings())


def test_a_training_is_deterministic_or_torchs_error_and_nothing_stays_so(pools: Pools) -> None:
    before = dict(pools[2].run(settings))
    for asked in (False, True):
        given = {"epochs": 1, "deterministic": asked, "callbacks": [note]}
        result = train_on(pools[2], network(), samples(40), **given)
        assert result.text(0) == f"{(asked, asked, False)}\n"
    with pytest.raises(SpmdError) as caught:
        train_on(pools[2], nn.Sequential(network(), Unpooled()), samples(8), deterministic=True)
    assert caught.value.first.ename == "RuntimeError"
    assert caught.value.first.where.startswith("test_option_effects.py, line ")  # the user's
    assert dict(pools[2].run(settings)) == before


class Unpooled(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        pooled, places = nn.functional.max_pool1d(inputs[:, None], 1, return_indices=True)
        return nn.functional.max_unpool1d(pooled, places, 1)[:, 0]


def test_cublas_has_its_variable_before_its_first_call() -> None:
    rank = Rank(0, 1, "cuda:0", Gpu(0, "GPU-0", "a GPU"), 1)
    assert engine_environment(rank, "", 1)[1]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in engine_environment(replace(rank, gpu=None), "", 1)[1]


def test_the_folder_of_another_training_means_its_newest_checkpoint(tmp_path: Path) -> None:
    trained(max_steps=5, checkpoint=str(tmp_path))
    seen = trained(resume=str(tmp_path))
    assert [event.step for event in seen.events if isinstance(event, ResumeEvent)] == [5]
    with pytest.raises(TrainingError, match="no checkpoint"):
        trained(resume=str(tmp_path / "b"))
