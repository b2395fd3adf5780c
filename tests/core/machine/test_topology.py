"""Who gets which device. The GPUs here are values, which is all that these functions read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpupool.core.errors import PlacementError
from gpupool.core.machine.gpus import discover
from gpupool.core.machine.topology import Gpu, choose, place, restrict, survey
from tests.support.raising import raises

GPUS = [Gpu(i, f"GPU-{i}abc{i}def", "NVIDIA H200") for i in range(4)]
# An A100 with MIG mode on, instance 1 deleted, beside a whole one.
MIXED = [
    Gpu(0, "MIG-bbbb-2222", "NVIDIA A100 MIG 3g", mig_index=0, parent_uuid="GPU-aaaa-1111"),
    Gpu(0, "MIG-cccc-2222", "NVIDIA A100 MIG 3g", mig_index=2, parent_uuid="GPU-aaaa-1111"),
    Gpu(1, "GPU-aaaa-3333", "NVIDIA A100-SXM4-40GB"),
]


def labels(gpus: Sequence[Gpu]) -> list[str]:
    return [gpu.label for gpu in gpus]


def test_each_rank_gets_its_own_gpu_and_its_share_of_the_cores() -> None:
    ranks = place(GPUS, None, num_cores=18)
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3]
    assert [rank.gpu for rank in ranks] == GPUS
    assert {(rank.world_size, rank.device, rank.num_threads) for rank in ranks} == {
        (4, "cuda:0", 4)
    }


def test_gpus_are_chosen_by_index_or_uuid_in_the_order_named() -> None:
    found = survey(GPUS, None)
    assert choose(found, ["2", "GPU-0abc0def", "1"]) == [GPUS[2], GPUS[0], GPUS[1]]
    assert choose(found, None) == GPUS


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
        choose(survey(GPUS, None), wanted)


def test_a_gpu_that_cannot_be_used_is_refused_with_the_reason() -> None:
    gpus = [GPUS[0], replace(GPUS[1], unavailable="its compute mode is prohibited")]
    with raises(PlacementError, "1", "its compute mode is prohibited"):
        choose(survey(gpus, None), ["1"])
    assert choose(survey(gpus, None), None) == GPUS[:1]


def test_a_gpu_with_mig_mode_on_stands_for_all_its_instances() -> None:
    assert labels(choose(survey(MIXED, None), ["0"])) == ["0:0", "0:2"]
    assert labels(choose(survey(MIXED, None), ["1", "0:2"])) == ["1", "0:2"]
    assert labels(restrict(MIXED, "1,MIG-cccc-2222")) == ["1", "0:2"]
    assert labels(restrict(MIXED, "0")) == ["0:0", "0:2"]


def test_cuda_visible_devices_means_what_it_means_to_cuda() -> None:
    # CUDA reads up to the first unknown entry
    for visible, indices in {
        "": [],
        "2,0": [2, 0],
        "GPU-2abc2def": [2],
        "0,9,1": [0],
        "-1": [],
    }.items():
        assert [gpu.index for gpu in restrict(GPUS, visible)] == indices


@pytest.mark.parametrize(
    ("gpus", "visible", "why"),
    [
        ([], None, "the NVIDIA driver finds no GPU"),
        (GPUS, "9", "CUDA_VISIBLE_DEVICES='9' names no GPU of this machine"),
        ([replace(GPUS[0], uuid="?", unavailable="lost")], None, "GPU 0: lost"),
        (GPUS, None, ""),
    ],
)
def test_the_reason_why_no_gpu_is_used(gpus: list[Gpu], visible: str | None, why: str) -> None:
    assert survey(gpus, visible).why_none == why


@pytest.mark.gpu
def test_a_real_gpu_is_described_by_its_driver() -> None:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    for gpu in discover().usable:
        assert gpu.uuid.startswith(("GPU-", "MIG-"))
        assert gpu.name != "?"
        assert float(gpu.compute_capability or 0) >= 5
        assert 0 <= (gpu.used_memory_bytes or 0) <= (gpu.total_memory_bytes or 0)
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu.uuid
        assert [seen.uuid for seen in discover().usable] == [gpu.uuid]
