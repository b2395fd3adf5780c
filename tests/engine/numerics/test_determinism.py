"""What deterministic=True sets while a training runs, and puts back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpupool import OptionsError, SpmdError, TrainingOptions
from gpupool.core.machine.topology import Gpu, Rank
from gpupool.engine.numerics import determinism
from gpupool.pool.launchers.processes import engine_environment
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on


def settings() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
    )


class Seen(nn.Module):
    """Keeps the settings that its forward meets; may use what torch cannot compute so."""

    def __init__(self, unpools: bool = False) -> None:
        super().__init__()
        self.network, self.unpools = network(), unpools
        self.register_buffer("flags", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        self.flags[:] = torch.tensor([settings()[0], settings()[2], settings()[3]])
        if self.unpools:
            pooled, places = nn.functional.max_pool2d(inputs[:, None, None], 1, return_indices=True)
            inputs = nn.functional.max_unpool2d(pooled, places, 1)[:, 0, 0]
        outputs: Tensor = self.network(inputs)
        return outputs


def test_a_training_is_deterministic_and_nothing_stays_so(pools: Pools) -> None:
    def here() -> Any:
        return settings()

    before = dict(pools[2].run(here))
    for asked in (False, True):
        kept = train_on(pools[2], Seen(), samples(40), epochs=1, deterministic=asked).model
        assert kept.get_buffer("flags").tolist() == [asked, asked, False]
    assert dict(pools[2].run(here)) == before


def test_what_torch_cannot_compute_so_is_its_error(pools: Pools) -> None:
    with pytest.raises(SpmdError) as caught:
        train_on(pools[2], Seen(unpools=True), samples(40), epochs=1, deterministic=True)
    first = caught.value.first
    assert first.ename == "RuntimeError"
    assert "max_unpooling2d_forward_out does not have a deterministic" in first.evalue
    assert first.where.startswith("test_determinism.py, line ")  # the user's
    train_on(pools[2], Seen(unpools=True), samples(40), epochs=1)


def test_settings_of_the_users_own_are_put_back() -> None:
    before = settings()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = True
        theirs = settings()
        with determinism.deterministic(True):
            assert settings() == (True, False, True, False)
        assert settings() == theirs
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[3]


def test_cublas_has_its_variable_before_its_first_call() -> None:
    gpu = Gpu(0, "GPU-0", "a GPU")
    rank = Rank(0, 1, "cuda:0", gpu, 1)
    assert engine_environment(rank, "", 1)[1]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in engine_environment(replace(rank, gpu=None), "", 1)[1]


def test_autotuning_and_deterministic_exclude_each_other() -> None:
    with raises(OptionsError, "compile"):
        TrainingOptions(deterministic=True, compile="max-autotune")
    TrainingOptions(deterministic=True, compile="reduce-overhead")
    with raises(OptionsError, "deterministic"):
        TrainingOptions(deterministic=1)  # type: ignore[arg-type]
