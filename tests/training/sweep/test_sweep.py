"""What a sweep may choose from; sweeps on two ranks, and in the notebook."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import ThresholdPruner
from optuna.samplers import TPESampler

import gpupool
from gpupool import GpuPoolError, OptionsError, Pool, SpmdError
from gpupool.pool.calls.presses import SAME_WISH_S
from gpupool.training.sweep import distributions, log
from tests.support.processes import until
from tests.support.trainings import network, samples, train_on
from tests.training.sweep.sweeps import noted, noting, states, swept
from tests.training.test_run import press

MIXED = [64, "wide", None, 0.5, True]
GOOD_VALUES = [
    (MIXED, CategoricalDistribution(MIXED)),
    (range(2, 6), IntDistribution(2, 5)),
    (range(2, 8, 2), IntDistribution(2, 6, step=2)),
    (range(6, 0, -2), IntDistribution(2, 6, step=2)),
    ((0, 0.5), FloatDistribution(0.0, 0.5)),
    (log(1, 8), FloatDistribution(1.0, 8.0, log=True)),
]
BAD_VALUES = [
    [],
    range(3, 3),
    3,
    "adam",
    (0.5, 0.0),
    (1.0, 2.0, 3.0),
    ("a", 1.0),
    [[64, 64]],
    [print],
]


@pytest.mark.parametrize(("values", "distribution"), GOOD_VALUES)
def test_lists_are_categories_and_ranges_are_numbers(values: Any, distribution: Any) -> None:
    assert distributions({"x": values}) == {"x": distribution}


@pytest.mark.parametrize("space", [{}, None, [1, 2], *({"x": values} for values in BAD_VALUES)])
def test_anything_else_is_refused(space: Any) -> None:
    with pytest.raises(OptionsError, match="space"):
        distributions(space)


@pytest.mark.parametrize("ends", [(0, 1), (1, 1), (2, 1), (1, math.inf), ("a", 1), (1, None)])
def test_a_log_scale_has_two_ends_above_0(ends: tuple[Any, Any]) -> None:
    with pytest.raises(OptionsError):
        log(*ends)


# ---- sweeps -------------------------------------------------------------------------------------


def reporting(params: dict[str, Any]) -> dict[str, float]:
    """It never ends if x is above 1."""
    step = 0
    while step < 3 or params["x"] > 1:
        gpupool.report(step, score=params["x"], other=9.0)
        step += 1
    return {"other": 9.0, "score": params["x"]}


@pytest.mark.parametrize("sampler", ["tpe", "gp", "random", TPESampler(seed=1)])
def test_a_sampler_finds_good_parameters(pool2: Pool, sampler: Any) -> None:
    space = {"lr": log(1e-3, 1e1), "depth": range(1, 4), "kind": ["a", "b"]}
    result = swept(pool2, lambda p: p["lr"] * p["depth"], space, sampler=sampler, trials=16)
    assert states(result) == 16 * ["done"]
    assert result.best is not None
    assert result.best.params == result.study.best_params
    assert result.best.value == result.study.best_value < 0.1
    assert {trial.rank for trial in result.progress.trials} == {0, 1}
    assert [row["lr"] for row in result.table()] == [t.params["lr"] for t in result.study.trials]
    assert len(repr(result).splitlines()) == 18


def test_a_grid_ends_and_the_best_has_the_best_metric(pool2: Pool) -> None:
    given: dict[str, Any] = {"metric": "score", "direction": "maximize"}
    result = swept(pool2, reporting, {"x": [-1, 1, 0], "y": [0, None]}, **given)
    assert states(result) == 6 * ["done"]
    tried = {(one.params["x"], one.params["y"]) for one in result.progress.trials}
    assert tried == {(x, y) for x in (-1, 1, 0) for y in (0, None)}
    assert result.best is not None
    assert (result.best.value, result.best.course) == (1.0, [(0, 1.0), (1, 1.0), (2, 1.0)])
    assert result.study.best_trial.intermediate_values == {0: 1.0, 1: 1.0, 2: 1.0}


def test_a_trial_that_fails_is_noted_and_the_sweep_goes_on(pool2: Pool) -> None:
    def objective(params: dict[str, Any]) -> Any:
        return {0: 0.5, 1: params, 2: float("nan"), 3: "three", 4: None, 5: 1}[params["x"]]

    result = swept(pool2, objective, {"x": range(7)})
    assert states(result) == ["done", *4 * ["failed"], "done", "failed"]
    assert [bool(trial.error) for trial in result.progress.trials] == [0, 1, 1, 1, 1, 0, 1]
    assert result.progress.trials[6].error == "KeyError: 6"


def test_a_sweep_of_which_the_first_trials_all_fail_ends_with_the_first_error(
    pool2: Pool, tmp_path: Path
) -> None:
    with pytest.raises(SpmdError) as caught:
        swept(pool2, noting(tmp_path, lambda x: {}[x]), {"x": range(100)}, storage=tmp_path / "a")
    assert caught.value.first.ename == "KeyError"
    result = swept(pool2, noting(tmp_path), {"x": range(100)}, storage=tmp_path / "a")
    assert result.progress.trials[0].number < 6  # so few were tried


@pytest.mark.parametrize("on", ["ranks", "notebook"])
def test_a_trial_that_is_not_worth_its_time_is_pruned(pool2: Pool, on: str) -> None:
    pruner = ThresholdPruner(upper=1.5, n_warmup_steps=2)
    result = swept(pool2, reporting, {"x": [1, 2]}, metric="score", pruner=pruner, on=on)
    assert states(result) == ["done", "pruned"]
    assert result.progress.trials[1].value == 2.0
    assert len(result.progress.trials[1].course) >= 3
    assert [trial.state.name for trial in result.study.trials] == ["COMPLETE", "PRUNED"]


@pytest.mark.parametrize("pruner", ["median", "hyperband", "successive_halving"])
def test_a_pruner_needs_reports(pool2: Pool, pruner: str) -> None:
    given: dict[str, Any] = {"pruner": pruner, "space": {"x": range(2)}}
    assert swept(pool2, reporting, metric="score", **given).best is not None
    with pytest.raises(OptionsError, match=r"gpupool\.report"):
        swept(pool2, lambda params: 1.0, **given)


def test_validations_of_a_training_in_the_notebook_are_reported(pool2: Pool) -> None:
    def objective(params: dict[str, Any]) -> float:
        settings = {"epochs": 2 if params["lr"] < 1 else 10_000, "batch_size": 8, **params}
        data = samples(24)
        result = train_on(pool2, network(), data, validation=data, **settings)
        return result.history.validations[-1].loss

    given = {"metric": "loss", "pruner": ThresholdPruner(upper=1.5), "on": "notebook"}
    result = swept(pool2, objective, {"lr": [0.01, 100.0]}, **given)
    assert states(result) == ["done", "pruned"]
    assert [step for step, _ in result.progress.trials[0].course] == [3, 6]
    assert result.progress.trials[1].course[-1][1] > 1.5


def test_a_seed_chooses_the_parameters(pool2: Pool) -> None:
    def params(seed: int) -> list[dict[str, Any]]:
        given = {"sampler": "tpe", "trials": 12, "seed": seed, "on": "notebook"}
        result = swept(pool2, lambda params: params["x"], {"x": log(1, 9)}, **given)
        return [trial.params for trial in result.progress.trials]

    assert params(1) == params(1) != params(2)


def press_twice() -> None:
    press()
    time.sleep(SAME_WISH_S + 0.2)
    press()


def when_begun(folder: Path, num: int, act: Callable[[], object]) -> None:

    def wait() -> None:
        until(lambda: len(list(folder.iterdir())) >= num, 30.0, "trials")
        act()

    threading.Thread(target=wait).start()


@pytest.mark.parametrize(("on", "is_of_pool"), [("ranks", 0), ("ranks", 1), ("notebook", 0)])
def test_a_press_stops_the_sweep_and_what_is_known_is_returned(
    pool2: Pool, on: str, is_of_pool: bool, tmp_path: Path
) -> None:
    num = 2 if on == "ranks" else 1

    def objective(params: dict[str, Any]) -> float:
        if params["x"]:
            (tmp_path / str(params["x"])).touch()
            time.sleep(60)
        return 0.0

    when_begun(tmp_path, num, pool2.interrupt if is_of_pool else press)
    result = swept(pool2, objective, {"x": range(100)}, on=on)
    assert states(result) == ["done", *num * ["stopped"]]
    assert result.progress.status == "stopped"
    assert result.study.trials[-1].state.name == "FAIL"
    assert len(pool2.run("1")) == 2


def test_a_second_press_is_heard_at_once(pool2: Pool, tmp_path: Path) -> None:
    def objective(params: dict[str, Any]) -> None:
        while True:
            try:
                (tmp_path / str(params["x"])).touch()
                time.sleep(60)
            except KeyboardInterrupt:
                pass

    when_begun(tmp_path, 2, press_twice)
    with pytest.raises(KeyboardInterrupt):
        swept(pool2, objective, {"x": range(100)})
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


BAD: list[dict[str, Any]] = [
    {"objective": 3},
    {"objective": pow},  # of two arguments
    {"trials": 0},
    {"sampler": "random"},  # without an end
    {"sampler": "tpee"},
    {"pruner": "medain"},
    {"direction": "up"},
    {"on": "rank"},
    {"seed": "a"},
    {"space": {"x": log(1, 2)}},
    {"storage": 3},
    {"storage": "/not/there/sweep.log"},
    {"storage": "/tmp"},
    {"storage": "sqlite:////not/there/sweep.db"},
    {"storage": "postgresql+nodriver://me:pa55word@host/db"},
    {"storage": "nonsense://me:pa55word@host/db"},
]


@pytest.mark.parametrize("given", BAD, ids=str)
def test_bad_input_is_one_sentence_and_nothing_runs(
    pool2: Pool, given: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    usual = {"objective": noting(tmp_path), "space": {"x": range(2)}}
    with pytest.raises(GpuPoolError) as caught:
        swept(pool2, **{**usual, **given})
    assert "pa55word" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert noted(tmp_path) == []
    assert capfd.readouterr() == ("", "")
    assert len(pool2.run("1")) == 2


def test_without_optuna_it_is_said_how_to_get_it(
    pool2: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(OptionsError, match=r"pip install 'gpupool\[sweep\]'"):
        swept(pool2, print, {"x": [1]})
