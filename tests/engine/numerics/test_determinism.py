"""What deterministic=True sets while a training runs, and puts back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpupool import SpmdError
from gpupool.core.machine.topology import Gpu, Rank
from gpupool.pool.launchers.processes import engine_environment
from tests.support.pools import Pools
from tests.support.trainings import network, samples, train_on


def settings() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark


class Seen(nn.Module):
    """Keeps the settings that its forward meets; may use what torch cannot compute so."""

    def __init__(self, unpools: bool = False) -> None:
        super().__init__()
        self.network, self.unpools = network(), unpools
        self.register_buffer("flags", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        self.flags[:] = torch.tensor(settings())
        if self.unpools:
            pooled, places = nn.functional.max_pool2d(inputs[:, None, None], 1, return_indices=True)
            inputs = nn.functional.max_unpool2d(pooled, places, 1)[:, 0, 0]
        outputs: Tensor = self.network(inputs)
        return outputs


def test_a_training_is_deterministic_or_torchs_error_and_nothing_stays_so(pools: Pools) -> None:
    def here() -> Any:
        return settings()

    before = dict(pools[2].run(here))
    for asked in (False, True):
        kept = train_on(pools[2], Seen(), samples(40), epochs=1, deterministic=asked).model
        assert kept.get_buffer("flags").tolist() == [asked, asked, False]
    with pytest.raises(SpmdError) as caught:
        train_on(pools[2], Seen(unpools=True), samples(40), epochs=1, deterministic=True)
    assert caught.value.first.ename == "RuntimeError"
    assert caught.value.first.where.startswith("test_determinism.py, line ")  # the user's
    assert dict(pools[2].run(here)) == before


def test_cublas_has_its_variable_before_its_first_call() -> None:
    rank = Rank(0, 1, "cuda:0", Gpu(0, "GPU-0", "a GPU"), 1)
    assert engine_environment(rank, "", 1)[1]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in engine_environment(replace(rank, gpu=None), "", 1)[1]
