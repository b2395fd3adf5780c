"""Some ranks do not train: the others have a group of their own. It takes no GPU to show that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import gpupool
from gpupool import Pool, PoolOptions, SpmdError
from tests.support.pools import Pools
from tests.support.trainings import network, samples, train_on, weights

ALL = "x = torch.ones(1); dist.all_reduce(x); x.item()"
DOUBLE = torch.float64
SETTINGS: dict[str, Any] = {"batch_size": 12, "lr": 0.1, "epochs": 3}


@pytest.fixture(scope="module")
def spare() -> Iterator[Pool]:
    """A pool of three where ranks 0 and 1 train, as if they had a GPU each and rank 2 none."""
    with Pool(PoolOptions(n=3, device="cpu")) as pool:
        placed = pool.placement
        pool.placement = replace(placed, training_ranks=(0, 1))
        pool.reform_group()
        pool.wait_until_usable()
        yield pool


@pytest.mark.long
def test_the_result_is_that_of_one_process(spare: Pool, pools: Pools) -> None:
    data, held_out = samples(50, DOUBLE), samples(17, DOUBLE, seed=1)
    ours = train_on(spare, network(DOUBLE), data, validation=held_out, **SETTINGS)
    alone = train_on(pools[1], network(DOUBLE), data, validation=held_out, **SETTINGS)
    assert (weights(ours.model) - weights(alone.model)).abs().max() < 1e-12
    assert ours.history.loss == pytest.approx(alone.history.loss, abs=1e-12)
    assert [v.num_samples for v in ours.history.validations] == [17] * 3
    assert ours.history.start is not None
    assert (ours.history.start.world_size, ours.history.start.backend) == (2, "gloo")


@pytest.mark.long
def test_a_rank_that_waits_in_the_training_group_is_freed(spare: Pool) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if os.environ["RANK"] == "1":
            raise ValueError("not here")
        return nn.functional.cross_entropy(outputs, targets)

    generation = spare.generation
    with pytest.raises(SpmdError, match="ValueError: not here") as caught:
        train_on(spare, network(), samples(64), loss=loss, batch_size=8)
    assert [rank for rank, error in caught.value.errors.items() if error.freed] == [0]
    assert spare.generation == generation + 1
    assert dict(spare.run(ALL)) == {0: 3.0, 1: 3.0, 2: 3.0}
    model, data = network(), samples(7)
    found = gpupool.predict(model, data, batch_size=4, pool=spare)
    assert torch.allclose(found, model(data.tensors[0]), atol=1e-6)
