"""Placement on machines with GPUs, as a driver in a C library describes them to nvidia-ml-py."""

from __future__ import annotations

import os
import threading
import time
from ast import literal_eval
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpupool.core.errors import OptionsError, PlacementError
from gpupool.core.options.pool_options import PoolOptions
from gpupool.core.wire.calls import Prepare, RunSource
from gpupool.pool.engines.engines import Engines
from gpupool.pool.environment.environment import notebook_place
from gpupool.pool.launchers.placement import Placement, place_ranks
from gpupool.pool.notices import unheard
from tests.servers.nvidia_driver import GIB, DriverOn, gpu, mig_gpu, process_of_another_user
from tests.support.processes import gone, until
from tests.support.raising import raises

FULL = (57 * GIB, 80 * GIB)


def lock(uuids: Sequence[str], number: int) -> list[str]:
    return list(uuids[:number])


def place(options: PoolOptions) -> Placement:
    return place_ranks(options, lock)


def labels(placement: Placement) -> list[str]:
    return [rank.gpu.label if rank.gpu else "-" for rank in placement.ranks]


def placed(driver: DriverOn, **options: Any) -> Placement:
    return driver.run(place, PoolOptions(**options))


def test_a_gpu_of_another_users_is_left_alone_unless_it_is_to_be_shared(driver: DriverOn) -> None:
    with process_of_another_user() as pid:
        driver.show(gpu(0), gpu(1, memory=FULL, compute={pid: FULL[0]}), gpu(2))
        assert labels(placed(driver, n=2)) == ["0", "2"]
        said = "You asked for 3 of 3 GPUs, and 2 can be had; GPU 1 is in use by "
        with raises(PlacementError, said, f" {pid} (", "`-n 2`"):
            placed(driver)
        with raises(PlacementError):
            placed(driver, gpus=("1",))
        assert labels(placed(driver, force=True)) == ["0", "1", "2"]


def test_instances_of_one_gpu_use_gloo(driver: DriverOn) -> None:
    driver.show(mig_gpu(0, {0: "3g", 2: "3g"}), gpu(1))
    placement = placed(driver)
    assert labels(placement) == ["0:0", "0:2", "1"]
    assert (placement.backend, placement.training_backend) == ("gloo", "gloo")
    assert any("instances of one GPU" in note for note in placement.notes)
    with raises(OptionsError, "backend", " 2 can be used"):
        placed(driver, backend="nccl")


# ---- engines whose GPUs are the driver's alone -------------------------------------------------
# torch sees none there, so no group is formed; all else is as on such a machine.

_engines: Engines | None = None


def start() -> dict[int, int]:
    """Start the engines of two ranks, and give their pids."""
    global _engines
    engines = _engines = Engines(60.0, lambda *_: None)

    def lock(uuids: Sequence[str], number: int) -> list[str]:
        return engines.launch.lock_gpus(uuids, number, False)

    _engines.start(place_ranks(PoolOptions(n=2), lock).ranks, unheard)
    _engines.call_all(Prepare(notebook_place()))
    return _engines.pids


def stop() -> None:
    assert _engines is not None
    _engines.stop()


def values(source: str) -> list[Any]:
    """The value of a cell on each rank."""
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
    """The ranks on two GPUs."""
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
