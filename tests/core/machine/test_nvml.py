"""What NVML says, read by NVIDIA's own package from a library in the place of the driver."""

from __future__ import annotations

import threading
import time

from gpupool.core.machine.nvml import read_gpus, wait_until_released
from tests.servers.nvidia_driver import GIB, DriverOn, gpu, mig_gpu

UUID = str(gpu(0)["uuid"])


def timed_wait(ended: dict[str, int], within_s: float) -> tuple[list[str], float]:
    start = time.monotonic()
    return wait_until_released(ended, within_s), time.monotonic() - start


def test_a_replacement_waits_until_the_dead_process_is_gone(driver: DriverOn) -> None:
    full = gpu(0, memory=(60 * GIB, 80 * GIB), compute={4711: 60 * GIB})
    driver.show(full, gpu(1, compute={4712: GIB}))
    asked = {UUID: 4711, str(gpu(1)["uuid"]): 99}  # of which the second one is gone already
    assert driver.run(timed_wait, asked, 0.2)[0] == [UUID]
    frees = threading.Timer(0.3, driver.show, [gpu(0), gpu(1)])
    frees.start()
    held, waited_s = driver.run(timed_wait, asked, 60)
    assert held == []
    assert 0.2 < waited_s < 30


def test_an_instance_is_waited_for_by_its_own_uuid(driver: DriverOn) -> None:
    card = mig_gpu(0, {1: "3g"})
    card["mig"][1]["compute"] = {4711: GIB}  # type: ignore[index]
    driver.show(card)
    instance = card["mig"][1]["uuid"]  # type: ignore[index]
    assert driver.run(wait_until_released, {instance: 4711}, 0) == [instance]
    assert driver.run(wait_until_released, {instance: 4712}, 0) == []


def test_there_is_nothing_to_wait_for_without_a_driver_or_a_gpu(driver: DriverOn) -> None:
    assert wait_until_released({}) == []
    driver.show("!15")
    held, waited_s = driver.run(timed_wait, {UUID: 4711, "GPU-unknown": 1}, 60)
    assert held == []
    assert waited_s < 30


def test_nvml_stays_open(driver: DriverOn) -> None:
    driver.show(gpu(0))
    driver.run(read_gpus)
    driver.calls()
    for _ in range(5):
        assert len(driver.run(read_gpus)[0]) == 1
    assert driver.calls() == []
