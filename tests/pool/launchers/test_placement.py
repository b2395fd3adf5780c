"""Look, choose, lock, place: on GPUs that are values, and as a driver in a C library shows them."""

from __future__ import annotations

import os
import threading
import time
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpupool.core.errors import OptionsError, PlacementError
from gpupool.core.machine.topology import NO_DRIVER, Discovery, Gpu, survey
from gpupool.core.options.pool_options import PoolOptions
from gpupool.core.wire.calls import Prepare, RunSource
from gpupool.pool.engines.engines import Engines
from gpupool.pool.environment.environment import notebook_place
from gpupool.pool.launchers.placement import Placement, Site, place_on, place_ranks
from gpupool.pool.notices import unheard
from tests.servers.nvidia_driver import GIB, DriverOn, gpu, mig_gpu, process_of_another_user
from tests.support.processes import gone, until
from tests.support.raising import raises

GPUS = [Gpu(i, f"GPU-{i}", "NVIDIA H200") for i in range(4)]
FOUR = survey(GPUS, None)
NONE = Discovery((), NO_DRIVER)


def lock_but(*taken: str) -> Callable[[Sequence[str], int], list[str]]:

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


@pytest.mark.parametrize(
    ("options", "taken", "expected", "backends"),
    [
        ({"n": 2}, "", "01", ("nccl", "nccl")),
        ({"n": 2}, "02", "13", ("nccl", "nccl")),
        ({"gpus": ("3", "0")}, "", "30", ("nccl", "nccl")),
        ({"gpus": ("3", "0"), "n": 1}, "", "3", ("nccl", "nccl")),
        ({"n": 6}, "", "0123--", ("gloo", "nccl")),
        ({"n": 6, "gpus": ("0", "1", "2", "3")}, "", "0123--", ("gloo", "nccl")),
        ({"n": 3, "device": "cpu"}, "0", "---", ("gloo", "gloo")),
    ],
)
def test_ranks_get_gpus_that_are_free_or_named_and_those_with_one_train(
    options: dict[str, Any], taken: str, expected: str, backends: tuple[str, str]
) -> None:
    placement = placed(taken=[f"GPU-{index}" for index in taken], **options)
    assert uuids(placement) == [None if index == "-" else f"GPU-{index}" for index in expected]
    assert (placement.backend, placement.training_backend) == backends
    assert placement.training_ranks == tuple(range(len(expected.rstrip("-")) or 3))
    assert placement.why_cpu == ""


def test_cpu_ranks_where_there_is_no_gpu_and_the_reason() -> None:
    placement = placed(NONE)
    assert uuids(placement) == [None, None]
    assert placement.training_ranks == (0, 1)
    assert placement.why_cpu == "no NVIDIA driver"
    assert placed(survey(GPUS, "")).why_cpu.startswith("CUDA_VISIBLE_DEVICES='' names no GPU")
    assert placed(NONE, device="cpu").why_cpu == ""


def test_what_cannot_be_had_is_refused_if_possible_before_anything_is_locked() -> None:
    for options in ({"n": 2}, {"n": 1, "gpus": ("3", "0")}):
        with raises(PlacementError, "GPU-0, GPU-2, GPU-3 in use by pid 4711"):
            placed(taken=["GPU-0", "GPU-2", "GPU-3"], **options)

    def never(uuids: Sequence[str], number: int) -> list[str]:
        raise AssertionError("locked")

    with raises(PlacementError, "device", NO_DRIVER, "`%gpupool start --cpu`"):
        place_on(PoolOptions(device="gpu"), [Site(never, NONE, 8)])
    with raises(OptionsError, "backend", " 4 ", "'gloo'"):
        place_on(PoolOptions(backend="nccl", n=5), [Site(never, FOUR, 8)])


# ---- as a driver shows them -------------------------------------------------------------------

FULL = (57 * GIB, 80 * GIB)


def place(options: PoolOptions) -> Placement:
    return place_ranks(options, lock_but())


def labels(placement: Placement) -> list[str]:
    return [rank.gpu.label if rank.gpu else "-" for rank in placement.ranks]


def placed_on(driver: DriverOn, **options: Any) -> Placement:
    return driver.run(place, PoolOptions(**options))


def test_a_gpu_of_another_users_is_left_alone_unless_it_is_to_be_shared(driver: DriverOn) -> None:
    with process_of_another_user() as pid:
        driver.show(gpu(0), gpu(1, memory=FULL, compute={pid: FULL[0]}), gpu(2))
        assert labels(placed_on(driver, n=2)) == ["0", "2"]
        said = "You asked for 3 of 3 GPUs, and 2 can be had; GPU 1 is in use by "
        with raises(PlacementError, said, f" {pid} (", "`-n 2`"):
            placed_on(driver)
        with raises(PlacementError):
            placed_on(driver, gpus=("1",))
        assert labels(placed_on(driver, force=True)) == ["0", "1", "2"]


def test_instances_of_one_gpu_use_gloo(driver: DriverOn) -> None:
    driver.show(mig_gpu(0, {0: "3g", 2: "3g"}), gpu(1))
    placement = placed_on(driver)
    assert labels(placement) == ["0:0", "0:2", "1"]
    assert (placement.backend, placement.training_backend) == ("gloo", "gloo")
    assert any("instances of one GPU" in note for note in placement.notes)
    with raises(OptionsError, "backend", " 2 can be used"):
        placed_on(driver, backend="nccl")


# ---- engines whose GPUs are the driver's alone -------------------------------------------------
# torch sees none there, so no group is formed; all else is as on such a machine.

_engines: Engines | None = None


def start() -> dict[int, int]:
    global _engines
    engines = _engines = Engines(60.0, lambda *_: None)
    engines.start(engines.place(PoolOptions(n=2), unheard).ranks, unheard)
    engines.call_all(Prepare(notebook_place()))
    return engines.pids


def stop() -> None:
    assert _engines is not None
    _engines.stop()


def values(source: str) -> list[Any]:
    assert _engines is not None
    calls = [_engines.call(rank, RunSource(source, None)) for rank in range(2)]
    return [literal_eval(call.result(60).value.text) for call in calls]


def restart(rank: int) -> float:
    """Restart a rank; when its new process began, in seconds since boot."""
    assert _engines is not None
    _engines.restart([rank])
    stat = Path(f"/proc/{_engines.pids[rank]}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")  # proc(5), field 22


@pytest.fixture
def pids(driver: DriverOn) -> Iterator[dict[int, int]]:
    driver.show(gpu(0), gpu(1))
    yield driver.run(start)
    driver.run(stop)


def test_a_rank_sees_its_gpu_alone(driver: DriverOn, pids: dict[int, int]) -> None:
    seen = driver.run(values, "import os\nos.environ['CUDA_VISIBLE_DEVICES']")
    assert seen == [gpu(0)["uuid"], gpu(1)["uuid"]]


def test_a_new_rank_begins_when_the_driver_shows_the_one_before_no_more(
    driver: DriverOn, pids: dict[int, int]
) -> None:
    driver.show(gpu(0), gpu(1, compute={pids[1]: FULL[0]}))
    freed_at: list[float] = []

    def free() -> None:
        until(lambda: gone(pids[1]), 30.0, "the end of the rank before")
        time.sleep(0.5)  # as long as the driver takes
        freed_at.append(time.clock_gettime(time.CLOCK_BOOTTIME))
        driver.show(gpu(0), gpu(1))

    frees = threading.Thread(target=free)
    frees.start()
    began_at = driver.run(restart, 1)
    frees.join()
    assert began_at > freed_at[0] - 0.02  # it is rounded down to a tick
