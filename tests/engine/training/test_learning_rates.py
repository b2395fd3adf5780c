"""Learning rates that depend on how training goes: those of callbacks, and "plateau"."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gpupool import CallbackInfo, SpmdError, TrainingOptions, TrainingResult
from gpupool.engine.training.learning_rates import LearningRates, Plateau
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on, weights

DOUBLE = torch.float64
SETTINGS: dict[str, Any] = {"batch_size": 8, "epochs": 3, "lr": 0.1}
NUM_STEPS = 4  # of an epoch


class Sets:
    """A callback that sets the rate of every group at some steps."""

    def __init__(self, at: dict[int, float], event: str = "step", rank: int | None = None) -> None:
        self.at, self.event, self.rank = at, event, rank

    def __call__(self, info: CallbackInfo) -> None:
        if info.event == self.event and info.step in self.at and self.rank in (None, info.rank):
            for group in info.optimizer.param_groups:
                group["lr"] = self.at[info.step]


class HalvesWhereItIs:
    """A callback that multiplies whatever the rate is, after each epoch."""

    def __call__(self, info: CallbackInfo) -> None:
        if info.event == "epoch":
            for group in info.optimizer.param_groups:
                group["lr"] *= 0.5


def trained(pools: Pools, n: int, **settings: Any) -> TrainingResult:
    data, validation = samples(30, DOUBLE), samples(20, DOUBLE, seed=1)
    settings = {**SETTINGS, "validation": validation, **settings}
    return train_on(pools[n], network(DOUBLE), data, **settings)


def rates(result: TrainingResult) -> list[float]:
    return [step.lr for step in result.history.steps]


# ---- set by a callback -------------------------------------------------------------------------


def test_a_rate_that_a_callback_sets_holds_and_is_what_the_weights_got(pools: Pools) -> None:
    steps = {1: 0.5, 6: 0.02}
    expected = [0.1] + 5 * [0.5] + 6 * [0.02]
    found = {n: trained(pools, n, callbacks=[Sets(steps)]) for n in (1, 2, 3)}
    for result in found.values():
        assert rates(result) == expected
        assert (weights(result.model) - weights(found[1].model)).abs().max() < 1e-12
    by_schedule = trained(pools, 1, lr=1.0, schedule=lambda step, epoch: expected[step - 1])
    assert (weights(by_schedule.model) - weights(found[1].model)).abs().max() < 1e-12


def test_it_replaces_schedule_and_warm_up_from_then_on(pools: Pools) -> None:
    cosine = trained(pools, 1, schedule="cosine", warmup=3)
    # The rate of that very step, which no comparison of numbers would find.
    same = {5: rates(cosine)[4]}
    result = trained(pools, 1, schedule="cosine", warmup=3, callbacks=[Sets(same)])
    assert rates(result) == [*rates(cosine)[:5], *7 * [rates(cosine)[4]]]
    begins = trained(pools, 1, schedule="cosine", warmup=3, callbacks=[Sets({0: 0.3}, "start")])
    assert rates(begins) == 12 * [0.3]


def test_each_group_keeps_its_own(pools: Pools) -> None:
    factors = {"learn_rate_factors": {"2.*": 10}}
    result = trained(pools, 2, callbacks=[HalvesWhereItIs()], **factors)
    assert rates(result) == pytest.approx(4 * [0.1] + 4 * [0.05] + 4 * [0.025], abs=1e-15)
    piecewise = trained(pools, 2, schedule="piecewise", drop_factor=0.5, drop_period=1, **factors)
    assert (weights(piecewise.model) - weights(result.model)).abs().max() < 1e-12


@pytest.mark.parametrize("event", ["step", "validation", "epoch", "checkpoint"])
def test_a_resumed_training_has_it_to_the_last_bit(
    pools: Pools, tmp_path: Path, event: str
) -> None:
    callbacks = [Sets({4: 0.03}, event)]
    whole = trained(pools, 2, schedule="cosine")
    settings: dict[str, Any] = {"schedule": "cosine", "callbacks": callbacks}
    first = trained(pools, 2, checkpoint=str(tmp_path), num_checkpoints=3, **settings)
    resumed = trained(pools, 2, resume=f"{tmp_path}/step-00000004.pt", **settings)
    assert rates(resumed) == rates(first) == [*rates(whole)[:4], *8 * [0.03]]
    assert torch.equal(weights(resumed.model), weights(first.model))


def test_another_lr_at_resuming_takes_its_place(pools: Pools, tmp_path: Path) -> None:
    saved = {"checkpoint": str(tmp_path), "num_checkpoints": 3}
    trained(pools, 1, callbacks=[Sets({2: 0.03})], **saved)
    resumed = trained(pools, 1, lr=0.2, resume=f"{tmp_path}/step-00000004.pt")
    assert rates(resumed)[4:] == 8 * [0.2]


def test_ranks_that_set_different_rates_are_an_error(pools: Pools) -> None:
    with raises(SpmdError, "other rate", "callbacks", ename="TrainingError"):
        trained(pools, 2, callbacks=[Sets({1: 0.5}, rank=1)])


@given(st.lists(st.floats(1e-9, 10), min_size=2, max_size=9))
def test_no_rates_that_differ_are_taken_for_equal(values: list[float]) -> None:
    def of(value: float) -> LearningRates:
        optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
        ranks_rates = LearningRates(optimizer, TrainingOptions())
        before = ranks_rates.now()
        optimizer.param_groups[0]["lr"] = value
        ranks_rates.hold_changed(before)
        return ranks_rates

    ranks = [of(value) for value in values]
    total = torch.tensor([rank.bits() for rank in ranks]).sum(0).tolist()  # wraps around

    def complains(rank: LearningRates) -> bool:
        try:
            rank.check_equal(total, len(ranks))
        except Exception:
            return True
        return False

    assert any(map(complains, ranks)) is (len(set(values)) > 1)


# ---- plateau -----------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["loss", "accuracy"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"drop_patience": 0},
        {"drop_patience": 2, "drop_factor": 0.5},
        {"drop_patience": 1, "min_factor": 0.05, "drop_factor": 0.3},
        {"drop_patience": 1, "min_delta": 0.1},
    ],
)
def test_plateau_is_that_of_torch(objective: str, values: dict[str, Any]) -> None:
    options = TrainingOptions(schedule="plateau", objective=objective, **values)
    ours = Plateau(options)
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    torchs = ReduceLROnPlateau(
        optimizer,
        "min" if objective == "loss" else "max",
        factor=values.get("drop_factor", 0.1),
        patience=values.get("drop_patience", 10),
        threshold=values.get("min_delta", 1e-4),
        threshold_mode="abs" if "min_delta" in values else "rel",
        min_lr=values.get("min_factor", 0.0),
        eps=0.0,
    )
    generator = random.Random(3)
    for step in range(200):
        value = 1 / (1 + step) + 0.3 * generator.random() if step % 17 else math.nan
        ours.add_validation(value)
        torchs.step(value)
        assert ours.factor == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
    assert ours.factor < 1
    again = Plateau(options)
    again.load_state_dict(ours.state_dict())
    assert again.state_dict() == ours.state_dict()


PLATEAU: dict[str, Any] = {
    "schedule": "plateau",
    "drop_patience": 0,
    "drop_factor": 0.5,
    "validate_every": 2,
    "warmup": 2,
    "lr": 3.0,
    "momentum": 0.0,
}


def test_the_rates_of_a_training_follow_its_validations_on_any_number_of_ranks(
    pools: Pools,
) -> None:
    found = {n: trained(pools, n, **PLATEAU) for n in (1, 2, 3)}
    optimizer = torch.optim.SGD([torch.zeros(1)], 3.0)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    validations = {one.step: one.loss for one in found[1].history.validations}
    expected = []
    for step in range(1, 13):
        factor = {1: 0.1, 2: 0.55}.get(step, 1.0)
        expected.append(factor * optimizer.param_groups[0]["lr"])
        if step in validations:
            scheduler.step(validations[step])
    assert expected[-1] < 3.0
    for result in found.values():
        assert rates(result) == pytest.approx(expected, rel=1e-12)
        assert (weights(result.model) - weights(found[1].model)).abs().max() < 1e-12


@pytest.mark.parametrize("step", [2, 4, 8])
def test_a_resumed_plateau_is_the_same_to_the_last_bit(
    pools: Pools, tmp_path: Path, step: int
) -> None:
    saved = {"checkpoint": str(tmp_path), "checkpoint_every": 2, "num_checkpoints": 9}
    whole = trained(pools, 2, **PLATEAU, **saved)
    resumed = trained(pools, 2, **PLATEAU, resume=f"{tmp_path}/step-{step:08}.pt")
    assert rates(resumed) == rates(whole)
    assert torch.equal(weights(resumed.model), weights(whole.model))
