"""Mistakes that people make with `train`, and the sentence that each is answered with."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gpupool
from gpupool import (
    OptionsError,
    Pool,
    PoolError,
    SpmdError,
    TrainingError,
    TrainingOptions,
    TrainingRun,
)
from gpupool.core.wire import environ
from gpupool.pool.session import stop
from tests.servers.s3 import SeaweedServer
from tests.support.pools import Pools
from tests.support.raising import raises, same_on
from tests.support.trainings import network, samples

# ---- arguments of train ------------------------------------------------------------------------


def test_options_are_keywords_of_train(pool2: Pool) -> None:
    result = gpupool.train(network(), samples(32), epochs=2, batch_size=8, lr=0.5, progress="none")
    assert [step.lr for step in result.history.steps] == [0.5] * 8
    options = TrainingOptions(epochs=2, batch_size=16, progress="none")
    assert gpupool.train(network(), samples(32), options, epochs=1).history.num_steps == 2


def test_no_pool_starts_for_a_call_that_is_wrong() -> None:
    for arguments, keywords in (
        ((), {"epoch": 1}),
        ((), {"loss": "cross_entropie"}),
        (({"epochs": 1},), {}),
        (("mse", samples(8)), {}),
    ):
        with pytest.raises((OptionsError, TrainingError)):
            gpupool.train(network(), samples(8), *arguments, **keywords)  # type: ignore[call-overload]
    with raises(PoolError, "`%gpupool start`"):
        gpupool.current_pool()


@pytest.mark.parametrize(
    "name",
    [
        *("num_workers", "devices", "drop_last", "validation_data", "max_epochs"),
        *("verbose", "LearnRateDropFactor"),
    ],
)
def test_a_name_of_another_library_is_answered_in_one_sentence(name: str) -> None:
    with raises(OptionsError, name) as caught:
        gpupool.train(network(), samples(8), **{name: 1})
    assert 40 < len(str(caught.value)) < 250


# ---- on a rank ---------------------------------------------------------------------------------


def _train() -> None:
    gpupool.train(network(), samples(8), epochs=1)


def _evaluate() -> None:
    gpupool.evaluate(network(), samples(8))


def _predict() -> None:
    gpupool.predict(network(), samples(8))


def _confusion() -> None:
    gpupool.confusion(network(), samples(8))


def _start() -> None:
    gpupool.start(n=1)


@pytest.mark.parametrize("function", [_train, _evaluate, _predict, _confusion, _start])
def test_what_uses_all_ranks_is_refused_on_a_rank(
    pools: Pools, function: Callable[[], None]
) -> None:
    with raises(SpmdError, ename="PoolError") as caught:
        pools[2].run(function)
    assert same_on(caught.value, 0, 1)


# ---- keys --------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_pool_that_starts_for_data_has_the_keys_with_which_they_were_listed(
    s3: SeaweedServer, photos_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ.update(s3.env)
    images = gpupool.ImageDatastore(photos_url)
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(len(images.classes)))
    model(torch.zeros(1, 3, 28, 28))
    try:
        result = gpupool.train(model, images, batch_size=50, max_steps=2, epochs=1, progress="none")
        assert result.history.num_steps == 2
        pool = gpupool.current_pool()
        assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(pool.environment.fingerprints)
    finally:
        stop()
    shown = capsys.readouterr().out
    assert "AWS_SECRET_ACCESS_KEY" in shown
    assert s3.env["AWS_SECRET_ACCESS_KEY"] not in shown


def test_keys_that_were_used_for_nothing_are_not_among_those_in_use() -> None:
    keys = dict.fromkeys(environ.AWS_KEY_NAMES[:2], "x")
    assert set(environ.used({**keys, "HF_TOKEN": "y"})) <= set(keys)
    assert environ.used({"HF_TOKEN": "y"}) == ()


def test_a_glob_that_matches_nothing_is_an_error(pools: Pools) -> None:
    with raises(OptionsError, "NOSUCH_*"):
        pools[2].propagate_env("NOSUCH_*")


# ---- small ones --------------------------------------------------------------------------------


def test_a_handle_that_is_computed_with_says_where_to(pools: Pools) -> None:
    pools[2]["x"] = 1
    x: Any = pools[2]["x"]
    for use in (lambda: x + 1, lambda: 2 * x, lambda: x / 2, lambda: -x, lambda: float(x)):
        with pytest.raises(TypeError, match=r"x is on the ranks: .* x\[0\]"):
            use()


def test_a_training_that_runs_says_how_far_it_is(pools: Pools) -> None:
    options = TrainingOptions(epochs=1, batch_size=8)
    run = TrainingRun(pools[2], network(), samples(32), "cross_entropy", options, None)
    run.result()
    assert repr(run) == f"TrainingRun({run.history.line()})"
