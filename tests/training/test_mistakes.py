"""Mistakes that people make with `train`, and the sentence that each is answered with."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gpupool
from gpupool import OptionsError, Pool, PoolError, TrainingError, TrainingOptions
from gpupool.pool.session import stop
from tests.servers.s3 import SeaweedServer
from tests.support.pools import Pools
from tests.support.raising import raises
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


# ---- on a rank ---------------------------------------------------------------------------------


def use_all_ranks() -> list[str]:
    arguments: Any = (network(), samples(8))
    calls: list[Callable[..., object]] = [
        *(gpupool.train, gpupool.evaluate, gpupool.predict, gpupool.confusion),
        lambda *_: gpupool.start(n=1),
    ]
    found = []
    for call in calls:
        try:
            call(*arguments)
        except Exception as error:
            found.append(type(error).__name__)
    return found


def test_what_uses_all_ranks_is_refused_on_a_rank(pools: Pools) -> None:
    assert dict(pools[2].run(use_all_ranks)) == dict.fromkeys((0, 1), ["PoolError"] * 5)


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
    assert shown.startswith("gpupool: no pool was running; started ")
    assert len(shown.splitlines()) == 1
    assert "AWS_SECRET_ACCESS_KEY" in shown
    assert s3.env["AWS_SECRET_ACCESS_KEY"] not in shown
