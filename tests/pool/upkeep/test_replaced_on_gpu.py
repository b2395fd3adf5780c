"""A rank that is replaced waits for the memory of its GPU: real engines, and a driver's library."""

from __future__ import annotations

import os
import threading
import time

from gpupool.core.machine.topology import Gpu, Rank
from gpupool.pool.notices import unheard
from gpupool.pool.processes.engines import Engines
from tests.servers.nvidia_driver import GIB, DriverOn, gpu

UUID = str(gpu(0)["uuid"])
LIMIT_S = 120.0
_engines: list[Engines] = []  # in the process that has the driver


def start() -> int:
    """The pid of an engine whose rank has GPU 0, and computes on the CPU."""
    # what torch makes of a driver that is only NVML's is not asked
    rank = Rank(0, 1, 0, 0, "here", "cpu", Gpu(0, UUID, "a GPU"), 1)
    engines = Engines(lambda *_: None)
    _engines.append(engines)
    engines.start([rank], LIMIT_S, unheard)
    return engines.pids[0]


def restart() -> float:
    """When the new engine was there."""
    _engines[0].restart([0], LIMIT_S, unheard)
    return time.monotonic()


def stop() -> None:
    _engines.pop().stop()


def test_a_new_rank_starts_when_the_memory_of_the_one_before_is_free(driver: DriverOn) -> None:
    driver.show(gpu(0))
    pid = driver.run(start)
    try:
        driver.show(gpu(0, compute={pid: 60 * GIB}))
        freed: list[float] = []

        def free() -> None:
            while os.path.exists(f"/proc/{pid}"):
                time.sleep(0.01)
            time.sleep(1.0)  # as the driver, which is not done when the process is gone
            freed.append(time.monotonic())
            driver.show(gpu(0))

        releasing = threading.Thread(target=free, daemon=True)
        releasing.start()
        there = driver.run(restart)
        releasing.join(LIMIT_S)
        assert freed
        assert there > freed[0]
    finally:
        driver.run(stop)
