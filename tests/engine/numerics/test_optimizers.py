"""Optimizers by name and by callable: what they compute, their groups, their state."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpupool import OptionsError, TrainingError, TrainingOptions
from gpupool.engine.numerics.optimizers import make_optimizer, set_learning_rates
from tests.support.raising import raises
from tests.support.trainings import network, samples, weights

DOUBLE = torch.float64


def one_pass(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> Tensor:
    """The weights after some steps on the same batch."""
    inputs, targets = samples(32, DOUBLE).tensors
    for _ in range(num_steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({"optimizer": "sgdm", "momentum": 0.5}, lambda p: torch.optim.SGD(p, 0.01, 0.5)),
        ({"optimizer": "sgdm"}, lambda p: torch.optim.SGD(p, 0.01, 0.9)),
        ({"optimizer": "sgdm", "momentum": 0}, lambda p: torch.optim.SGD(p, 0.01)),
        ({"optimizer": "adam"}, lambda p: torch.optim.Adam(p, 0.01)),
        (
            {"optimizer": "adamw", "weight_decay": 0.1},
            lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
        ),
        (
            {"optimizer": "rmsprop", "momentum": 0.3},
            lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.3),
        ),
        ({"optimizer": torch.optim.Adagrad}, lambda p: torch.optim.Adagrad(p, 0.01)),
        (
            {"optimizer": partial(torch.optim.SGD, momentum=0.9, nesterov=True)},
            lambda p: torch.optim.SGD(p, 0.01, 0.9, nesterov=True),
        ),
    ],
    ids=["sgdm", "usual sgdm", "sgd", "adam", "adamw", "rmsprop", "callable", "partial"],
)
def test_options_reach_the_optimizer(settings: dict[str, Any], reference: Any) -> None:
    model, expected = network(DOUBLE), network(DOUBLE)
    found = one_pass(model, make_optimizer(model, TrainingOptions(lr=0.01, **settings)))
    assert torch.equal(found, one_pass(expected, reference(expected.parameters())))


def muon_of_the_docs() -> Any:
    """What the recipe in docs/training.md defines."""
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["MuonAdamW"]


def test_the_muon_of_the_docs_is_that_of_torch_for_matrices_and_adamw_for_the_rest() -> None:
    model, expected = network(DOUBLE), network(DOUBLE)
    options = TrainingOptions(optimizer=muon_of_the_docs(), lr=0.02, weight_decay=0.1)
    optimizer = make_optimizer(model, options)
    matrices = [p for p in expected.parameters() if p.ndim == 2]
    others = [p for p in expected.parameters() if p.ndim != 2]
    parts = [
        torch.optim.Muon(matrices, 0.02, 0.1, 0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, 0.02, weight_decay=0.1),
    ]
    inputs, targets = samples(32, DOUBLE).tensors
    for _ in range(3):
        expected.zero_grad()
        torch.nn.functional.cross_entropy(expected(inputs), targets).backward()
        for part in parts:
            part.step()
    assert torch.equal(one_pass(model, optimizer), weights(expected))


@pytest.mark.parametrize("name", ["sgdm", "adamw", "rmsprop", "muon of the docs"])
def test_an_optimizer_goes_on_from_its_state(name: str) -> None:
    is_own = name == "muon of the docs"
    options = TrainingOptions(optimizer=muon_of_the_docs() if is_own else name, lr=0.02)
    whole, model = network(DOUBLE), network(DOUBLE)
    expected = one_pass(whole, make_optimizer(whole, options), 6)
    first = make_optimizer(model, options)
    one_pass(model, first, 3)
    second = make_optimizer(model, options)
    second.load_state_dict(first.state_dict())
    assert torch.equal(one_pass(model, second, 3), expected)


def test_groups_have_their_factors_on_learning_rate_and_weight_decay() -> None:
    options = TrainingOptions(
        lr=0.1,
        weight_decay=0.01,
        learn_rate_factors={"2.weight": 10, "2.bias": 20},
        weight_decay_factors={"*.bias": 0},
    )
    optimizer = make_optimizer(network(), options)
    found = {(g["lr"], g["weight_decay"]): len(g["params"]) for g in optimizer.param_groups}
    assert found == {(0.1, 0.01): 1, (0.1, 0.0): 1, (1.0, 0.01): 1, (2.0, 0.0): 1}
    halved = replace(options, lr=0.05)
    assert set_learning_rates(optimizer, halved, 1, 8, 1) == 0.05
    assert sorted(g["lr"] for g in optimizer.param_groups) == [0.05, 0.05, 0.5, 1.0]


def test_factor_0_freezes_and_nothing_left_is_an_error() -> None:
    model = network()
    make_optimizer(model, TrainingOptions(learn_rate_factors={"0.*": 0}))
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    with raises(TrainingError):
        make_optimizer(network(), TrainingOptions(learn_rate_factors={"*": 0}))


@pytest.mark.parametrize("option", ["learn_rate_factors", "weight_decay_factors"])
def test_a_pattern_that_matches_nothing_is_an_error(option: str) -> None:
    options = TrainingOptions(weight_decay=0.1, **{option: {"head.*": 2}})
    with raises(OptionsError, option, "'head.*'"):
        make_optimizer(network(), options)


def test_a_callable_that_makes_no_optimizer_is_an_error() -> None:
    with raises(OptionsError, "optimizer", " list"):
        make_optimizer(network(), TrainingOptions(optimizer=lambda groups: groups))
