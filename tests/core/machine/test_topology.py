"""Who gets which device. The GPUs here are values, which is all that these functions read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpupool.core.errors import PlacementError
from gpupool.core.machine.gpus import visible_gpus
from gpupool.core.machine.topology import (
    HIDDEN,
    NO_DRIVER,
    Discovery,
    Gpu,
    choose,
    place,
    restrict,
    split_mig,
    survey,
    training_ranks,
)
from tests.support.raising import raises

GPUS = [Gpu(i, f"GPU-{i}abc{i}def", "NVIDIA H200") for i in range(4)]
# As NVML shows an A100 with MIG mode on, instance 1 deleted, beside a whole one.
A100 = Gpu(
    0,
    "GPU-aaaa-1111",
    "NVIDIA A100-SXM4-40GB",
    temperature_c=40,
    compute_capability="8.0",
    instances=tuple(
        Gpu(0, f"MIG-{letter * 4}-2222", "NVIDIA A100 MIG 3g.20gb", 20 * 2**30, mig_index=i)
        for i, letter in ((0, "b"), (2, "c"))
    ),
)
WHOLE = Gpu(1, "GPU-aaaa-3333", "NVIDIA A100-SXM4-40GB")
MIXED = [A100, WHOLE]


def found(gpus: Sequence[Gpu], visible_devices: str | None = None) -> Discovery:
    return survey(gpus, "", visible_devices)


def labels(gpus: Sequence[Gpu]) -> list[str]:
    return [gpu.label for gpu in gpus]


# ---- which rank gets what ----------------------------------------------------------------------


def test_each_rank_gets_its_own_gpu_and_its_share_of_the_cores() -> None:
    ranks = place(GPUS, None, num_cores=18)
    assert [rank.rank for rank in ranks] == [rank.local_rank for rank in ranks] == [0, 1, 2, 3]
    assert [rank.gpu for rank in ranks] == GPUS
    assert {(rank.world_size, rank.device, rank.num_threads) for rank in ranks} == {
        (4, "cuda:0", 4)
    }
    assert training_ranks(ranks) == (0, 1, 2, 3)


def on_nodes(*nodes: int) -> list[Sequence[int]]:
    """The CPUs that ranks run on, whose GPUs are on these of two NUMA nodes of eight CPUs each."""
    of_node = tuple(range(8)), tuple(range(8, 16))
    gpus = [replace(GPUS[i], cpus=of_node[node]) for i, node in enumerate(nodes)]
    return [rank.cpus for rank in place(gpus, None, 16, range(16))]


def test_a_rank_runs_near_to_its_gpu_where_it_loses_no_cores_by_it() -> None:
    low, high = tuple(range(8)), tuple(range(8, 16))
    assert on_nodes(0, 0, 1, 1) == [low, low, high, high]
    assert on_nodes(1, 0) == [high, low]
    assert on_nodes(0, 0) == [(), ()]  # else node 1 would do nothing
    assert on_nodes(0, 0, 1) == [(), (), high]  # where two have 5 threads each of 8 cores
    near = replace(GPUS[0], cpus=tuple(range(16)))  # there is one node
    assert [rank.cpus for rank in place([near], None, 16, range(16))] == [()]


# ---- what a user names -------------------------------------------------------------------------


def test_gpus_are_chosen_by_index_or_uuid_in_the_order_named() -> None:
    assert choose(found(GPUS), ["2", "GPU-0abc0def", "1"]) == [GPUS[2], GPUS[0], GPUS[1]]
    assert choose(found(GPUS), None) == GPUS


@pytest.mark.parametrize(
    ("wanted", "shown"),
    [
        (["9"], " 0 (NVIDIA H200), 1 (NVIDIA H200), "),
        (["GPU-1ab"], " 0 (NVIDIA H200), "),
        (["1", "GPU-1abc1def"], "'GPU-1abc1def'"),
    ],
)
def test_a_wrong_choice_is_refused(wanted: list[str], shown: str) -> None:
    with raises(PlacementError, wanted[-1], shown):
        choose(found(GPUS), wanted)


def test_a_gpu_that_cannot_be_used_is_refused_with_the_reason() -> None:
    gpus = [GPUS[0], replace(GPUS[1], unavailable="its compute mode is prohibited")]
    with raises(PlacementError, "1", "its compute mode is prohibited"):
        choose(found(gpus), ["1"])
    with raises(PlacementError, "0", HIDDEN):
        choose(found(gpus, "1"), ["0"])
    assert choose(found(gpus), None) == GPUS[:1]


# ---- MIG ---------------------------------------------------------------------------------------


def test_instances_stand_in_place_of_their_gpu() -> None:
    assert labels(split_mig(MIXED)) == ["0:0", "0:2", "1"]
    first = split_mig(MIXED)[0]
    assert (first.uuid, first.parent_uuid) == ("MIG-bbbb-2222", "GPU-aaaa-1111")
    assert (first.total_memory_bytes, first.temperature_c) == (20 * 2**30, 40)
    assert first.compute_capability == "8.0"
    ranks = place(choose(found(MIXED), None), None, 6)
    assert [rank.gpu.uuid for rank in ranks if rank.gpu] == [
        "MIG-bbbb-2222", "MIG-cccc-2222", "GPU-aaaa-3333",
    ]  # fmt: skip


def test_mig_mode_without_an_instance_gives_nothing_to_use() -> None:
    bare = replace(A100, instances=())
    assert labels(found([bare, WHOLE]).usable) == ["1"]
    assert found([bare]).why_none == "GPU 0: MIG mode is on and has no instance"


# ---- CUDA_VISIBLE_DEVICES ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-2abc2def", [2]),
        ("0,9,1", [0]),  # CUDA reads up to the first unknown entry
        ("-1", []),
    ],
)
def test_cuda_visible_devices_means_what_it_means_to_cuda(visible: str, indices: list[int]) -> None:
    assert [gpu.index for gpu in restrict(GPUS, visible)] == indices


def test_hidden_gpus_are_listed_and_not_used() -> None:
    seen = found(GPUS, "2,0")
    assert labels(seen.usable) == ["2", "0"]
    assert [gpu.unavailable for gpu in seen.gpus] == ["", HIDDEN, "", HIDDEN]
    assert seen.why_none == ""


# ---- why there is none -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "trouble", "visible", "why"),
    [
        ([], NO_DRIVER, None, "no NVIDIA driver"),
        (GPUS, "", "9", "CUDA_VISIBLE_DEVICES='9' names no GPU of this machine"),
        ([replace(GPUS[0], uuid="?", unavailable="lost")], "", "0", "GPU 0: lost"),
        (GPUS, "", None, ""),
    ],
)
def test_the_reason_why_no_gpu_is_used(
    gpus: list[Gpu], trouble: str, visible: str | None, why: str
) -> None:
    assert survey(gpus, trouble, visible).why_none == why


@pytest.mark.gpu
def test_a_real_gpu_is_described_by_its_driver() -> None:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    for gpu in visible_gpus():
        assert gpu.uuid.startswith(("GPU-", "MIG-"))
        assert gpu.name != "?"
        assert float(gpu.compute_capability or 0) >= 5
        assert 0 <= (gpu.used_memory_bytes or 0) <= (gpu.total_memory_bytes or 0)
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu.uuid
        assert [seen.uuid for seen in visible_gpus()] == [gpu.uuid]
