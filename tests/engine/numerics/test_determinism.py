"""What deterministic=True sets while a training runs, puts back, and says of what torch cannot."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpupool import OptionsError, Pool, SpmdError, TrainingError, TrainingOptions
from gpupool.core.machine.topology import Gpu, Rank
from gpupool.engine.group.forming import World
from gpupool.engine.numerics import determinism
from gpupool.pool.processes.launch import engine_environment
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on

ALONE = World(0, 1, torch.device("cpu"))


def settings() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
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


def test_what_torch_cannot_compute_so_is_an_error_with_what_to_do(pools: Pools) -> None:
    with pytest.raises(SpmdError) as caught:
        train_on(pools[2], Seen(unpools=True), samples(40), epochs=1, deterministic=True)
    first = caught.value.first
    assert (first.ename, first.kind) == ("TrainingError", "not deterministic")
    assert first.evalue.startswith("max_unpooling2d_forward_out differs from run to run: ")
    assert first.where.startswith("test_determinism.py, line ")  # the user's
    train_on(pools[2], Seen(unpools=True), samples(40), epochs=1)


def fail_inside() -> None:
    with determinism.deterministic(True, ALONE) as world:
        assert world is ALONE
        assert settings() == (True, False, True, False, ":4096:8")
        raise RuntimeError("shapes")


def test_settings_of_the_users_own_are_put_back_and_other_errors_are_left_alone() -> None:
    before = settings()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = True
        theirs = settings()
        with pytest.raises(RuntimeError, match=r"^shapes$"):
            fail_inside()
        assert settings() == theirs
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[3]
    with (
        raises(TrainingError, "not deterministic"),
        determinism.deterministic(True, ALONE),
    ):
        raise RuntimeError(  # torch's words
            "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms("
            "True)` or ..., you must set ... CUBLAS_WORKSPACE_CONFIG=:4096:8 or ..."
        )


def test_cublas_has_its_variable_before_its_first_call() -> None:
    gpu = Gpu(0, "GPU-0", "a GPU")
    rank = Rank(0, 1, 0, 0, "here", "cuda:0", gpu, 1)
    assert engine_environment(rank, 1)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in engine_environment(replace(rank, gpu=None), 1)


def form_twice() -> tuple[Any, ...]:
    """In a rank: the group of a deterministic training, twice, and what NCCL would have read."""
    world = World.here(torch.device("cpu"))
    first, second = (determinism.in_one_order(world) for _ in range(2))
    assert first.group is second.group is not None
    ranks = dist.get_process_group_ranks(first.group)
    total = first.sum(torch.ones(1)).item()
    return ranks, total, first.backend, os.environ.get("NCCL_ALGO")


def test_nccl_gets_a_group_of_its_own_once(pool2: Pool) -> None:
    # what NCCL makes of it only GPUs show; here it is gloo's
    assert dict(pool2.run(form_twice)) == {r: ([0, 1], 2.0, "gloo", None) for r in (0, 1)}


def test_autotuning_and_deterministic_exclude_each_other() -> None:
    with raises(OptionsError, "conflict", "compile"):
        TrainingOptions(deterministic=True, compile="max-autotune")
    TrainingOptions(deterministic=True, compile="reduce-overhead")
    with raises(OptionsError, "type", "deterministic"):
        TrainingOptions(deterministic=1)  # type: ignore[arg-type]
