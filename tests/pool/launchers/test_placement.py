"""Look, choose, lock, place: on GPUs that are values, with a lock that is a list of owners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gpupool.core.errors import OptionsError, PlacementError
from gpupool.core.machine.topology import NO_DRIVER, Discovery, Gpu, survey
from gpupool.core.options.pool_options import PoolOptions
from gpupool.pool.launchers.placement import Placement, Site, place_on
from tests.support.raising import raises

GPUS = [Gpu(i, f"GPU-{i}", "NVIDIA H200") for i in range(4)]
FOUR = survey(GPUS, None)
NONE = Discovery((), NO_DRIVER)


def lock_but(*taken: str) -> Callable[[Sequence[str], int], list[str]]:
    """A lock under which these UUIDs belong to somebody else."""

    def lock(uuids: Sequence[str], number: int) -> list[str]:
        free = [uuid for uuid in uuids if uuid not in taken]
        if len(free) < number:
            raise PlacementError(f"{', '.join(taken)} in use by pid 4711.", "locked")
        return free[:number]

    return lock


def placed(found: Discovery = FOUR, taken: Sequence[str] = (), **options: Any) -> Placement:
    return place_on(PoolOptions(**options), [Site(lock_but(*taken), found, 8)])


def uuids(placement: Placement) -> list[str | None]:
    return [rank.gpu and rank.gpu.uuid for rank in placement.ranks]


def test_fewer_ranks_find_the_gpus_that_are_free() -> None:
    assert uuids(placed(n=2)) == ["GPU-0", "GPU-1"]
    assert uuids(placed(n=2, taken=["GPU-0", "GPU-2"])) == ["GPU-1", "GPU-3"]
    with raises(PlacementError, "GPU-0, GPU-2, GPU-3 in use by pid 4711"):
        placed(n=2, taken=["GPU-0", "GPU-2", "GPU-3"])


def test_the_gpus_that_were_named_are_needed_as_they_are() -> None:
    assert uuids(placed(gpus=("3", "0"))) == ["GPU-3", "GPU-0"]
    assert uuids(placed(gpus=("3", "0"), n=1)) == ["GPU-3"]
    with raises(PlacementError, "GPU-3 in use"):
        placed(gpus=("3", "0"), n=1, taken=["GPU-3"])


@pytest.mark.parametrize("options", [{"n": 6}, {"n": 6, "gpus": ("0", "1", "2", "3")}])
def test_ranks_beyond_the_gpus_talk_by_gloo_and_the_others_train_by_nccl(
    options: dict[str, Any],
) -> None:
    placement = placed(**options)
    assert uuids(placement) == ["GPU-0", "GPU-1", "GPU-2", "GPU-3", None, None]
    assert (placement.backend, placement.training_backend) == ("gloo", "nccl")
    assert placement.training_ranks == (0, 1, 2, 3)
    assert {rank.num_threads for rank in placement.ranks} == {1}


@pytest.mark.parametrize("found", [FOUR, NONE])
def test_cpu_ranks_where_they_were_asked_for_lock_nothing(found: Discovery) -> None:
    placement = placed(found, device="cpu", n=3, taken=["GPU-0"])
    assert uuids(placement) == [None, None, None]
    assert (placement.backend, placement.training_backend) == ("gloo", "gloo")
    assert placement.training_ranks == (0, 1, 2)
    assert placement.why_cpu == ""


def test_cpu_ranks_where_there_is_no_gpu_and_the_reason() -> None:
    placement = placed(NONE)
    assert uuids(placement) == [None, None]
    assert placement.training_ranks == (0, 1)
    assert placement.why_cpu == "no NVIDIA driver"
    assert placed(survey(GPUS, "")).why_cpu.startswith("CUDA_VISIBLE_DEVICES='' names no GPU")


def test_what_cannot_be_had_is_refused_before_anything_is_locked() -> None:
    def never(uuids: Sequence[str], number: int) -> list[str]:
        raise AssertionError("locked")

    with raises(PlacementError, "device", NO_DRIVER, "`%gpupool start --cpu`"):
        place_on(PoolOptions(device="gpu"), [Site(never, NONE, 8)])
    with raises(OptionsError, "backend", " 4 ", "'gloo'"):
        place_on(PoolOptions(backend="nccl", n=5), [Site(never, FOUR, 8)])
