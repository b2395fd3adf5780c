"""What deterministic=True sets while a training runs, and puts back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gpupool import SpmdError
from gpupool.core.machine.topology import Gpu, Rank
from gpupool.pool.launchers.processes import engine_environment
from tests.support.pools import Pools
from tests.support.trainings import network, samples, train_on


def settings() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark


def note(info: Any) -> None:
    """A callback."""
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
    assert caught.value.first.where.startswith("test_determinism.py, line ")  # the user's
    assert dict(pools[2].run(settings)) == before


class Unpooled(nn.Module):
    """What torch cannot compute so."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        pooled, places = nn.functional.max_pool1d(inputs[:, None], 1, return_indices=True)
        return nn.functional.max_unpool1d(pooled, places, 1)[:, 0]


def test_cublas_has_its_variable_before_its_first_call() -> None:
    rank = Rank(0, 1, "cuda:0", Gpu(0, "GPU-0", "a GPU"), 1)
    assert engine_environment(rank, "", 1)[1]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in engine_environment(replace(rank, gpu=None), "", 1)[1]
