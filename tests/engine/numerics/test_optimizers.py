"""Optimizers by name and by callable: what they compute, their groups, their state."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from gpupool import OptionsError, TrainingError, TrainingOptions
from gpupool.engine.numerics.optimizers import make_optimizer
from tests.support.raising import raises
from tests.support.trainings import network

NESTEROV = {"momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(
    ("settings", "kind", "own"),
    [
        ({"optimizer": "sgdm", "momentum": 0}, torch.optim.SGD, {"momentum": 0}),
        ({"optimizer": "rmsprop", "momentum": 0.3}, torch.optim.RMSprop, {"momentum": 0.3}),
        ({"optimizer": torch.optim.Adagrad}, torch.optim.Adagrad, {}),
        ({"optimizer": partial(torch.optim.SGD, **NESTEROV)}, torch.optim.SGD, NESTEROV),
    ],
)
def test_options_reach_the_optimizer(settings: dict[str, Any], kind: Any, own: Any) -> None:
    optimizer = make_optimizer(network(), TrainingOptions(lr=0.02, **settings))
    (group,) = optimizer.param_groups
    assert type(optimizer) is kind
    assert {name: group[name] for name in own} == own
    assert (group["lr"], len(group["params"])) == (0.02, 4)


def test_groups_have_their_factors_on_learning_rate_and_weight_decay() -> None:
    options = TrainingOptions(
        lr=0.1,
        weight_decay=0.01,
        learn_rate_factors={"0.bias": 0, "2.weight": 10, "2.bias": 20},
        weight_decay_factors={"*.bias": 0},
    )
    model = network()
    optimizer = make_optimizer(model, options)
    found = {(g["lr"], g["weight_decay"]): len(g["params"]) for g in optimizer.param_groups}
    assert found == {(0.1, 0.01): 1, (1.0, 0.01): 1, (2.0, 0.0): 1}
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]


@pytest.mark.parametrize(
    ("settings", "error", "names"),
    [
        ({"learn_rate_factors": {"*": 0}}, TrainingError, ()),
        ({"learn_rate_factors": {"a.*": 2}}, OptionsError, ("learn_rate_factors", "'a.*'")),
        (
            {"weight_decay": 0.1, "weight_decay_factors": {"a.*": 2}},
            OptionsError,
            ("weight_decay_factors", "'a.*'"),
        ),
        ({"optimizer": lambda groups: groups}, OptionsError, ("optimizer", " list")),
    ],
)
def test_what_makes_no_optimizer_is_an_error(settings: Any, error: Any, names: Any) -> None:
    with raises(error, *names):
        make_optimizer(network(), TrainingOptions(**settings))
