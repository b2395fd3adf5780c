"""Sweeps on two ranks, and in the notebook."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import optuna
import pytest

import gpupool
from gpupool import GpuPoolError, OptionsError, Pool, SpmdError
from gpupool.pool.calls.presses import SAME_WISH_S
from gpupool.training.sweep.result import SweepProgress
from gpupool.training.sweep.space import log
from tests.support.processes import until
from tests.support.trainings import network, samples, train_on
from tests.training.sweep.sweeps import noted, noting, states, swept


@pytest.mark.parametrize("sampler", ["tpe", "gp", "random", optuna.samplers.QMCSampler(seed=1)])
def test_a_sampler_finds_good_parameters(pool2: Pool, sampler: Any) -> None:
    space = {"lr": log(1e-3, 1e1), "depth": range(1, 4), "kind": ["a", "b"]}
    result = swept(pool2, lambda p: p["lr"] * p["depth"], space, sampler=sampler, trials=16)
    assert states(result) == 16 * ["done"]
    best = result.best
    assert best is not None
    assert best.value == result.study.best_value == min(t.value for t in result.study.trials)
    assert best.params == result.study.best_params
    assert best.value < 0.1
    assert {trial.rank for trial in result.progress.trials} == {0, 1}
    rows = result.table()
    assert [row["lr"] for row in rows] == [trial.params["lr"] for trial in result.progress.trials]
    assert len(repr(result).splitlines()) == 18


def test_a_grid_ends_and_the_best_is_chosen_by_a_metric_of_a_dict(pool2: Pool) -> None:
    def objective(params: dict[str, Any]) -> dict[str, float]:
        for step in range(3):
            gpupool.report(step, accuracy=params["x"] * step, loss=0.0)
        return {"loss": 0.0, "accuracy": params["x"] * params["y"]}

    space = {"x": [1, 2], "y": range(3)}
    result = swept(pool2, objective, space, metric="accuracy", direction="maximize")
    assert len(result.progress.trials) == 6
    assert result.best is not None
    assert result.best.params == {"x": 2, "y": 2}
    assert result.best.course == [(0, 0.0), (1, 2.0), (2, 4.0)]
    assert result.study.best_trial.intermediate_values == {0: 0.0, 1: 2.0, 2: 4.0}


def test_a_trial_that_fails_is_noted_and_the_sweep_goes_on(pool2: Pool) -> None:
    def objective(params: dict[str, Any]) -> Any:
        return {0: 0.5, 1: params, 2: float("nan"), 3: "three", 4: None, 5: 1}[params["x"]]

    result = swept(pool2, objective, {"x": [0, 1, 2, 3, 4, 5, 6]})
    assert states(result) == ["done", *4 * ["failed"], "done", "failed"]
    assert [bool(trial.error) for trial in result.progress.trials] == [0, 1, 1, 1, 1, 0, 1]
    assert result.progress.trials[6].error == "KeyError: 6"
    assert result.best is not None
    assert result.best.value == 0.5


def test_a_sweep_of_which_the_first_trials_all_fail_ends_with_the_first_error(pool2: Pool) -> None:
    seen: list[SweepProgress] = []
    with pytest.raises(SpmdError) as caught:
        swept(pool2, lambda params: params["y"], {"x": range(100)}, show=seen.append)
    assert caught.value.first.ename == "KeyError"
    assert seen[-1].status == "stopped"
    assert len(seen[-1].trials) <= 5
    assert seen[-1].best is None


@pytest.mark.parametrize("on", ["ranks", "notebook"])
def test_a_trial_that_is_not_worth_its_time_is_pruned(pool2: Pool, on: str) -> None:
    def objective(params: dict[str, Any]) -> float:
        step = 0
        while params["x"] or step < 3:
            gpupool.report(step, loss=params["x"], other=-1.0)
            step += 1
        return float(params["x"])

    pruner = optuna.pruners.ThresholdPruner(upper=0.5, n_warmup_steps=2)
    result = swept(pool2, objective, {"x": [0, 1]}, metric="loss", pruner=pruner, on=on)
    assert states(result) == ["done", "pruned"]
    assert result.progress.trials[1].value == 1.0
    assert len(result.progress.trials[1].course) >= 3
    assert result.study.trials[1].state is optuna.trial.TrialState.PRUNED


@pytest.mark.parametrize("pruner", ["median", "hyperband", "successive_halving"])
def test_a_pruner_needs_reports(pool2: Pool, pruner: str) -> None:
    def reports(params: dict[str, Any]) -> float:
        gpupool.report(1, loss=0.5)
        return 0.5

    assert swept(pool2, reports, {"x": range(3)}, pruner=pruner).best is not None
    with pytest.raises(OptionsError, match="accuracy"):
        swept(pool2, reports, {"x": range(3)}, pruner=pruner, metric="accuracy")


def test_validations_of_a_training_in_the_notebook_are_reported(pool2: Pool) -> None:
    def objective(params: dict[str, Any]) -> float:
        model, data, epochs = network(), samples(24), 2 if params["lr"] < 1 else 10_000
        lr = params["lr"]
        result = train_on(pool2, model, data, validation=data, lr=lr, epochs=epochs, batch_size=8)
        return result.history.validations[-1].loss

    pruner = optuna.pruners.ThresholdPruner(upper=1.5)
    given = {"metric": "loss", "pruner": pruner, "on": "notebook"}
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


def press_when(folder: Path, num: int, again_after_s: float = 0.0) -> None:
    """Press Ctrl-C once so many trials have begun."""

    def press() -> None:
        until(lambda: len(list(folder.iterdir())) >= num, 30.0, "trials")
        os.kill(os.getpid(), signal.SIGINT)
        if again_after_s:
            time.sleep(again_after_s)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()


@pytest.mark.parametrize(("on", "num"), [("ranks", 2), ("notebook", 1)])
def test_a_press_stops_the_sweep_and_what_is_known_is_returned(
    pool2: Pool, on: str, num: int, tmp_path: Path
) -> None:
    def objective(params: dict[str, Any]) -> float:
        if params["x"]:
            (tmp_path / str(params["x"])).touch()
            time.sleep(60)
        return 0.0

    press_when(tmp_path, num)
    result = swept(pool2, objective, {"x": range(100)}, on=on)
    assert result.progress.status == "stopped"
    assert states(result) == ["done", *num * ["stopped"]]
    assert result.study.trials[-1].state is optuna.trial.TrialState.FAIL
    assert dict(pool2.run("1 + 1")) == {0: 2, 1: 2}


def test_a_second_press_is_heard_at_once(pool2: Pool, tmp_path: Path) -> None:
    def objective(params: dict[str, Any]) -> None:
        while True:
            try:
                (tmp_path / str(params["x"])).touch()
                time.sleep(60)
            except KeyboardInterrupt:
                pass

    press_when(tmp_path, 2, again_after_s=SAME_WISH_S + 0.2)
    with pytest.raises(KeyboardInterrupt):
        swept(pool2, objective, {"x": range(100)})
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


BAD = {
    "objective": {"objective": 3},
    "trials": {"trials": 0},
    "no end": {"sampler": "tpe"},
    "sampler": {"sampler": "tpee"},
    "pruner": {"pruner": "medain"},
    "sampler of what": {"sampler": 3},
    "direction": {"direction": "up"},
    "on": {"on": "rank"},
    "space": {"space": {"x": 3}},
    "endless grid": {"space": {"x": log(1, 2)}},
    "no folder": {"storage": "/not/there/sweep.log"},
    "folder": {"storage": "/tmp"},
    "database": {"storage": "sqlite:////not/there/sweep.db"},
    "driver": {"storage": "postgresql+nodriver://me:pa55word@host/db"},
    "protocol": {"storage": "nonsense://me:pa55word@host/db"},
}


@pytest.mark.parametrize("given", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence_and_nothing_runs(
    pool2: Pool, given: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    usual = {"objective": noting(tmp_path), "space": {"x": range(2)}}
    with pytest.raises(GpuPoolError) as caught:
        swept(pool2, **{**usual, **given})
    told = str(caught.value)
    assert "pa55word" not in told
    assert "\n" not in told
    assert noted(tmp_path) == []
    assert capfd.readouterr() == ("", "")
    assert len(pool2.run("1")) == 2


def test_without_optuna_it_is_said_how_to_get_it(
    pool2: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(OptionsError, match=r"pip install 'gpupool\[sweep\]'"):
        swept(pool2, print, {"x": [1]})
