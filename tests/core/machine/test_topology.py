"""Who gets which device. The GPUs here are values, which is all that these functions read."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from gpupool.core.errors import PlacementError
from gpupool.core.machine.gpus import discover
from gpupool.core.machine.topology import Gpu, choose, restrict, survey
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
        (["4"], "its compute mode is prohibited"),
    ],
)
def test_a_wrong_choice_is_refused(wanted: list[str], shown: str) -> None:
    prohibited = Gpu(4, "GPU-4", "NVIDIA H200", unavailable="its compute mode is prohibited")
    with raises(PlacementError, wanted[-1], shown):
        choose(survey([*GPUS, prohibited], None), wanted)


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
