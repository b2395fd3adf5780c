"""Who gets which device. The GPUs here are values, which is all that these functions read."""

from __future__ import annotations

import os

import pytest

import gpupool
from gpupool.core.errors import PlacementError
from gpupool.core.topology import (
    Gpu,
    GpuProcess,
    GpuTable,
    choose,
    num_usable_cores,
    place,
    restrict,
    visible_gpus,
)

GPUS = [Gpu(i, f"GPU-{i}abc{i}def", "NVIDIA H200") for i in range(4)]


def test_each_rank_gets_its_own_gpu_and_its_share_of_the_cores() -> None:
    ranks = place(GPUS, None, "auto", num_cores=18)
    assert [rank.rank for rank in ranks] == [rank.local_rank for rank in ranks] == [0, 1, 2, 3]
    assert [rank.gpu for rank in ranks] == GPUS
    assert {(rank.world_size, rank.device, rank.num_threads) for rank in ranks} == {
        (4, "cuda:0", 4)
    }


def test_fewer_ranks_than_gpus_take_the_first_ones() -> None:
    assert [rank.gpu for rank in place(GPUS, 2, "auto", 8)] == GPUS[:2]


@pytest.mark.parametrize(("gpus", "device"), [([], "auto"), (GPUS, "cpu")])
def test_two_cpu_ranks_where_no_gpu_is_there_or_wanted(gpus: list[Gpu], device: str) -> None:
    ranks = place(gpus, None, device, num_cores=1)
    assert [(rank.device, rank.gpu, rank.num_threads) for rank in ranks] == [("cpu", None, 1)] * 2


def test_more_ranks_than_gpus_are_refused_with_both_ways_out() -> None:
    with pytest.raises(PlacementError) as caught:
        place(GPUS, 5, "auto", 8)
    assert str(caught.value) == (
        "5 ranks need 5 GPUs, one each, and 4 can be used. Ask for n=4, or for CPU ranks with "
        "--cpu (device='cpu')."
    )


def test_gpus_asked_for_where_there_are_none() -> None:
    with pytest.raises(PlacementError) as caught:
        place([], None, "gpu", 8)
    assert str(caught.value).startswith("device='gpu': this machine has no NVIDIA GPU")
    assert "`%gpupool start --cpu` starts CPU ranks" in str(caught.value)


def test_gpus_are_chosen_by_index_or_uuid_in_the_order_named() -> None:
    assert choose(GPUS, ["2", "GPU-0abc0def", "GPU-1ab"]) == [GPUS[2], GPUS[0], GPUS[1]]
    assert choose(GPUS, None) == GPUS


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["9"], "GPU '9' is not there: there are 0 (NVIDIA H200), 1 (NVIDIA H200), "),
        (["GPU-"], "GPU 'GPU-' is not there: "),
        (["1", "GPU-1abc1def"], "GPU 'GPU-1abc1def' is named twice; each rank needs its own."),
    ],
)
def test_a_wrong_choice_is_refused(wanted: list[str], message: str) -> None:
    with pytest.raises(PlacementError) as caught:
        choose(GPUS, wanted)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("", []),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("GPU-2abc", [2]),
        ("0,9,1", [0]),  # CUDA reads up to the first unknown entry
        ("-1", []),
        ("NoDevFiles", []),
        ("1,1,2", [1]),
    ],
)
def test_cuda_visible_devices_means_what_it_means_to_cuda(visible: str, indices: list[int]) -> None:
    assert [gpu.index for gpu in restrict(GPUS, visible)] == indices


def test_the_table_shows_what_is_known_and_a_dash_for_the_rest() -> None:
    busy = Gpu(
        index=0,
        uuid="GPU-0",
        name="NVIDIA H200",
        total_memory_bytes=141 * 2**30,
        used_memory_bytes=3 * 2**29,
        utilization_percent=7,
        temperature_c=41,
        processes=(GpuProcess(4711, "python", "ada", None),),
    )
    header, first, second = repr(GpuTable([busy, Gpu(1, "GPU-1", "T4")])).splitlines()
    assert header.split() == [
        "index", "name", "memory", "utilization", "temperature", "held", "by", "uuid",
    ]  # fmt: skip
    assert "1.5 of 141.0 GiB  7 %          41 °C        python 4711 (ada, - GiB)  GPU-0" in first
    assert second.split() == ["1", "T4", "-", "of", "-", "GiB", "-", "-", "-", "GPU-1"]


def test_nothing_visible_is_said_in_a_sentence() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    assert repr(gpupool.gpus()) == GpuTable.NONE
    assert repr(gpupool.gpus()).startswith("No NVIDIA GPU: ")


def test_this_process_may_use_at_least_one_core() -> None:
    assert 1 <= num_usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.gpu
def test_a_real_gpu_is_described_by_its_driver() -> None:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    found = visible_gpus()
    if not found:
        pytest.skip("this machine has no NVIDIA GPU")
    for gpu in found:
        assert gpu.uuid.startswith("GPU-")
        assert gpu.name != "?"
        assert 0 <= (gpu.used_memory_bytes or 0) <= (gpu.total_memory_bytes or 0)
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu.uuid
        assert [seen.uuid for seen in visible_gpus()] == [gpu.uuid]
