"""Every option of training changes what it should: one table, on the very loop that ranks run.

The loop runs here in this process as rank 0 of 1; what only several ranks can show is below, on
pools. `ELSEWHERE` says where the rest is tested.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
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
from gpupool.engine.training.run import FitResult
from tests.support.trainings import network, samples, weights

DOUBLE = torch.float64
DATA, HELD_OUT = samples(50, DOUBLE), samples(21, DOUBLE, seed=1)
STEPS = 4  # of an epoch, with the batches of BASE
BASE: dict[str, Any] = {"batch_size": 16, "epochs": 3, "lr": 0.1}


@dataclass
class Seen:
    """What a training has told and left, and what its network and data have met."""

    options: TrainingOptions
    events: list[Event] = field(default_factory=list)
    forwards: list[Tensor] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    result: FitResult | None = None

    def of(self, kind: type) -> list[Any]:
        """The events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def steps(self) -> list[StepEvent]:
        return self.of(StepEvent)

    @property
    def kept(self) -> FitResult:
        assert self.result is not None
        return self.result

    @property
    def weights(self) -> Tensor:
        return weights(self.kept.model)


class Watched(TensorDataset):
    """Data that notes what is read."""

    def __init__(self, seen: Seen, data: TensorDataset) -> None:
        super().__init__(*data.tensors)
        self._seen = seen

    def __getitem__(self, index: int) -> Any:
        self._seen.read.append(int(index))
        return super().__getitem__(index)


def trained(
    model: nn.Module | None = None,
    data: TensorDataset = DATA,
    validation: Any = None,
    **values: Any,
) -> Seen:
    """Train in this process, and see what comes of it."""
    seen = Seen(TrainingOptions(**{**BASE, **values}))
    model = network(DOUBLE) if model is None else model

    def emit(events: Any) -> None:
        seen.events += events

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if module.training:
            seen.forwards.append(inputs[0])

    handle = model.register_forward_pre_hook(note)
    with torch.random.fork_rng(devices=[]):
        seen.result = fit(
            model,
            Watched(seen, data),
            "cross_entropy",
            seen.options,
            world=World(0, 1, torch.device("cpu")),
            validation=validation,
            emit=emit,
        )
    handle.remove()
    return seen


def pictures() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    return layers.double(), TensorDataset(
        torch.randn(8, 3, 6, 6, dtype=DOUBLE), torch.arange(8) % 3
    )


# ---- options that make other weights: (they, what else both trainings have) ----------------------

OTHER_WEIGHTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"optimizer": "adam"}, {}),
    ({"optimizer": "adamw", "weight_decay": 0.1}, {"optimizer": "adam", "weight_decay": 0.1}),
    ({"optimizer": "rmsprop"}, {}),
    ({"optimizer": torch.optim.Adagrad}, {}),
    ({"optimizer": partial(torch.optim.Adam, betas=(0.5, 0.9))}, {"optimizer": "adam"}),
    ({"lr": 0.2}, {}),
    ({"momentum": 0.5}, {}),
    ({"momentum": 0.5}, {"optimizer": "rmsprop"}),
    ({"weight_decay": 0.1}, {}),
    ({"weight_decay": 0.1}, {"optimizer": "rmsprop"}),
    ({"weight_decay": 0.1}, {"optimizer": torch.optim.Adagrad}),
    ({"weight_decay_factors": {"0.*": 5}}, {"weight_decay": 0.1}),
    ({"learn_rate_factors": {"2.*": 10}}, {}),
    ({"seed": 1}, {}),
    ({"shuffle": "never"}, {}),
    ({"shuffle": "once"}, {}),
    ({"normalize": "fit"}, {}),
    ({"clip": 0.01}, {}),
    ({"ema": 0.5}, {}),
    ({"batch_size": 8}, {}),
    ({"epochs": 2}, {}),
    ({"max_steps": 5}, {}),
]


@pytest.mark.parametrize(("option", "both"), OTHER_WEIGHTS)
def test_an_option_of_the_step_makes_other_weights(
    option: dict[str, Any], both: dict[str, Any]
) -> None:
    with_it, without = trained(**{**both, **option}), trained(**both)
    assert torch.isfinite(with_it.weights).all()
    assert not torch.equal(with_it.weights, without.weights)


# ---- the learning rate is that of the schedule ---------------------------------------------------


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


# ---- the others, one by one ----------------------------------------------------------------------

Check = Callable[[], None]
CHECKS: dict[str, Check] = {}


def shows(*names: str) -> Callable[[Check], Check]:
    """The function checks these options."""

    def keep(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return keep


@shows("learn_rate_factors")
def a_factor_of_0_freezes() -> None:
    seen, before = trained(learn_rate_factors={"0.*": 0}), network(DOUBLE)
    assert torch.equal(seen.kept.model[0].weight, before[0].weight)  # type: ignore[index]
    assert not torch.equal(seen.kept.model[2].weight, before[2].weight)  # type: ignore[index]


@shows("weight_decay_factors")
def a_factor_of_0_takes_the_decay_away() -> None:
    without = trained(weight_decay=0.1, weight_decay_factors={"*": 0})
    assert torch.equal(without.weights, trained().weights)


@shows("shuffle", "seed")
def the_order_is_that_of_the_data_a_new_one_or_the_same() -> None:
    orders = {
        (how, seed): trained(shuffle=how, seed=seed).read[:150]
        for how in ("never", "once", "every-epoch")
        for seed in (0, 1)
    }
    assert orders["never", 0] == orders["never", 1] == [*range(50)] * 3
    for how, num in (("once", 1), ("every-epoch", 3)):
        epochs = [orders[how, 0][i : i + 50] for i in (0, 50, 100)]
        assert len({tuple(epoch) for epoch in epochs}) == num
        assert all(sorted(epoch) == [*range(50)] for epoch in epochs)
        assert orders[how, 0] != orders[how, 1]


@shows("epochs", "max_steps", "batch_size")
def the_length_is_as_planned() -> None:
    assert len(trained(epochs=2).steps) == 2 * STEPS
    short = trained(max_steps=5)
    assert (len(short.steps), short.kept.stopped_by) == (5, "max_steps")
    assert [step.num_samples for step in trained(batch_size=20, epochs=1).steps] == [20, 20, 10]


@shows("channels_last")
def convolutions_get_channels_last() -> None:
    for value in (False, True):
        model, data = pictures()
        seen = trained(model, data, channels_last=value, epochs=1)
        strides = seen.forwards[0].is_contiguous(memory_format=torch.channels_last)
        assert strides is value


@shows("validate_every")
def validations_come_as_often_as_asked() -> None:
    for every, at in (("epoch", [4, 8, 12]), (5, [5, 10, 12])):
        seen = trained(validation=HELD_OUT, validate_every=every)
        assert [event.step for event in seen.of(ValidationEvent)] == at


@shows("metrics")
def validations_have_the_metrics() -> None:
    assert trained(validation=HELD_OUT).of(ValidationEvent)[0].metrics == {}
    seen = trained(validation=HELD_OUT, metrics=["f1", "recall"])
    assert {*seen.of(ValidationEvent)[0].metrics} == {"f1", "recall"}


@shows("objective", "keep", "patience")
def the_best_is_kept_and_ends_training_if_nothing_is_better() -> None:
    worse = {"lr": 4.0, "validation": HELD_OUT, "epochs": 12, "seed": 2}
    best, last = trained(**worse), trained(keep="last", **worse)
    losses = [event.loss for event in best.of(ValidationEvent)]
    assert losses.index(min(losses)) < 11, "this training has to get worse at its end"
    assert best.kept.kept_step == STEPS * (1 + losses.index(min(losses)))
    assert not torch.equal(best.weights, last.weights)
    by_accuracy = trained(objective="accuracy", **worse)
    accuracies = [event.accuracy for event in by_accuracy.of(ValidationEvent)]
    assert by_accuracy.kept.kept_step == STEPS * (1 + accuracies.index(max(accuracies)))
    assert by_accuracy.kept.kept_step != best.kept.kept_step
    impatient = trained(patience=1, **worse)
    assert impatient.kept.stopped_by == "patience"
    assert len(impatient.steps) < len(best.steps)


@pytest.mark.parametrize("check", dict.fromkeys(CHECKS.values()), ids=lambda check: check.__name__)
def test_an_option_does_what_it_says(check: Check) -> None:
    check()


# ---- nothing is left out -------------------------------------------------------------------------

ELSEWHERE = {
    **dict.fromkeys(("accumulate", "batch_norm", "compile", "precision"), "test_steps.py"),
    **dict.fromkeys(("callbacks", "profile", "tensorboard"), "test_hooks.py"),
    **dict.fromkeys(("checkpoint", "checkpoint_every", "num_checkpoints"), "test_resume.py"),
    **dict.fromkeys(("on_failure", "overwrite", "resume"), "test_resume.py"),
    "on_error": "../batches/test_unreadable.py",
    "progress": "../../notebook/monitor/test_text.py",
    "deterministic": "../numerics/test_determinism.py",
    "weights": "../batches/test_order.py",
    **dict.fromkeys(("collate", "inputs", "targets", "weight", "gather"), "test_own_batches.py"),
    "workers": "test_own_draws.py",
}
OF_THE_RATE = {"schedule", "drop_factor", "drop_period", "min_factor", "warmup"}


def test_every_option_is_in_one_of_the_tables() -> None:
    names = {field.name for field in dataclasses.fields(TrainingOptions)}
    of_the_step = {name for option, _ in OTHER_WEIGHTS for name in option}
    for name, file in ELSEWHERE.items():
        assert name in (Path(__file__).parent / file).read_text()
    assert names == of_the_step | OF_THE_RATE | {*CHECKS} | {*ELSEWHERE}
