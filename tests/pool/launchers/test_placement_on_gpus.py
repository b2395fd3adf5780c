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

from gpupool.core.errors import GpuPoolError
from gpupool.core.options.pool_options import PoolOptions
from gpupool.core.wire.calls import Prepare, RunSource
from gpupool.pool import session
from gpupool.pool.engines.engines import Engines
from gpupool.pool.environment.environment import notebook_place
from gpupool.pool.launchers.placement import Placement, place_ranks
from gpupool.pool.notices import unheard
from tests.servers.nvidia_driver import (
    GIB,
    DriverOn,
    gpu,
    mig_gpu,
    process_of_another_user,
)
from tests.support.processes import gone, until

FULL = (57 * GIB, 80 * GIB)


def lock(uuids: Sequence[str], number: int) -> list[str]:
    return list(uuids[:number])


def place(options: PoolOptions) -> Placement:
    return place_ranks(options, lock)


def refusal(options: PoolOptions) -> str:
    """The error of a placement."""
    with pytest.raises(GpuPoolError) as refused:
        place(options)
    return str(refused.value)


def labels(placement: Placement) -> list[str]:
    return [rank.gpu.label if rank.gpu else "-" for rank in placement.ranks]


def placed(driver: DriverOn, **options: Any) -> Placement:
    return driver.run(place, PoolOptions(**options))


def refused(driver: DriverOn, **options: Any) -> str:
    return driver.run(refusal, PoolOptions(**options))


def test_a_gpu_of_another_users_is_left_alone_unless_it_is_to_be_shared(driver: DriverOn) -> None:
    with process_of_another_user() as pid:
        driver.show(gpu(0), gpu(1, memory=FULL, compute={pid: FULL[0]}), gpu(2))
        assert labels(placed(driver, n=2)) == ["0", "2"]
        text = refused(driver)
        assert text.startswith("You asked for 3 of 3 GPUs, and 2 can be had; GPU 1 is in use by ")
        assert f" {pid} (" in text
        assert "`-n 2`" in text
        assert "GPU 1 is in use by " in refused(driver, gpus=("1",))
        assert labels(placed(driver, force=True)) == ["0", "1", "2"]


def test_instances_of_one_gpu_use_gloo(driver: DriverOn) -> None:
    driver.show(mig_gpu(0, {0: "3g", 2: "3g"}), gpu(1))
    placement = placed(driver)
    assert labels(placement) == ["0:0", "0:2", "1"]
    assert (placement.backend, placement.training_backend) == ("gloo", "gloo")
    assert any("instances of one GPU" in note for note in placement.notes)
    assert "nccl" in refused(driver, backend="nccl")


# ---- engines whose GPUs are the driver's alone -------------------------------------------------
# torch sees none there, so no group is formed; all else is as on such a machine.

_engines: Engines | None = None


def start() -> dict[int, int]:
    """Start the engines of two ranks, and give their pids."""
    global _engines
    _engines = Engines(lambda *_: None)
    _engines.start(place_ranks(PoolOptions(n=2), _engines.lock_gpus).ranks, 60.0, unheard)
    _engines.call_all(Prepare(notebook_place()))
    return _engines.pids


def stop() -> None:
    assert _engines is not None
    _engines.stop()


def cell(source: str) -> list[tuple[Any, str]]:
    """For each rank the value of a cell, or the hint of its error."""
    assert _engines is not None
    calls = [_engines.call(rank, RunSource(source, None)) for rank in range(2)]
    replies = [call.result(60) for call in calls]
    return [
        (None, reply.raised.error.hint) if reply.raised else (literal_eval(reply.value.text), "")
        for reply in replies
    ]


def restart(rank: int) -> float:
    """Restart a rank; when its new process began, in seconds since boot."""
    assert _engines is not None
    _engines.restart([rank], 60.0, unheard)
    stat = Path(f"/proc/{_engines.pids[rank]}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")  # proc(5), field 22


@pytest.fixture
def pids(driver: DriverOn) -> Iterator[dict[int, int]]:
    """The ranks on two GPUs, each next to half of the CPUs."""
    driver.show(*NODES)
    yield driver.run(start)
    driver.run(stop)


CPUS = sorted(os.sched_getaffinity(0))
HALVES = CPUS[: len(CPUS) // 2], CPUS[len(CPUS) // 2 :]
NODES = [gpu(n, cpus=half) for n, half in enumerate(HALVES)]


def test_a_rank_sees_its_gpu_alone_and_runs_near_to_it(
    driver: DriverOn, pids: dict[int, int]
) -> None:
    seen = driver.run(
        cell, "import os\n(os.environ['CUDA_VISIBLE_DEVICES'], os.sched_getaffinity(0))"
    )
    for rank, half in enumerate(HALVES):
        expected = set(half) if HALVES[0] else set(CPUS)
        assert seen[rank][0] == (gpu(rank)["uuid"], expected)
    # these engines are no pool of the notebook's
    assert repr(driver.run(session.gpus)).count("no: in use by another pool") == 2


def test_a_new_rank_begins_when_the_driver_shows_the_one_before_no_more(
    driver: DriverOn, pids: dict[int, int]
) -> None:
    driver.show(NODES[0], gpu(1, compute={pids[1]: FULL[0]}))
    freed_at: list[float] = []

    def free() -> None:
        until(lambda: gone(pids[1]), 30.0, "the end of the rank before")
        time.sleep(0.5)  # as long as the driver takes
        freed_at.append(time.clock_gettime(time.CLOCK_BOOTTIME))
        driver.show(*NODES)

    frees = threading.Thread(target=free)
    frees.start()
    began_at = driver.run(restart, 1)
    frees.join()
    assert began_at > freed_at[0] - 0.02  # it is rounded down to a tick
