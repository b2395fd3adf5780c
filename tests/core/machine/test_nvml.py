"""What NVML says, read by NVIDIA's own package from a library in the place of the driver."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from gpupool.core.machine import nvml
from gpupool.core.machine.gpus import discover
from gpupool.core.machine.nvml import read_gpus
from tests.servers.nvidia_driver import (
    GIB,
    LOST,
    MISMATCH,
    NO_PERMISSION,
    DriverOn,
    gpu,
    mig_gpu,
)

ME = os.getpid()


def test_a_process_cannot_draw_by_its_name(driver: DriverOn) -> None:
    source = "open('/proc/self/comm', 'w').write('\\x1b[2Jnice'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        driver.show(gpu(0, compute={process.pid: GIB}))
        (seen,) = driver.run(read_gpus)[0]
        process.communicate(b"\n")
    assert [one.name for one in seen.processes] == ["\\x1b[2Jnice"]


# ---- what the driver says ----------------------------------------------------------------------


def test_instances_are_found_where_there_are_gaps(driver: DriverOn) -> None:
    driver.show(mig_gpu(0, {0: "1g", 3: "3g"}), mig_gpu(1, {}), gpu(2))
    found = driver.run(discover)
    assert [one.label for one in found.usable] == ["0:0", "0:3", "2"]
    first = found.usable[0]
    assert (first.card, first.uuid[:4], first.name) == (gpu(0)["uuid"], "MIG-", "1g")
    assert (first.total_memory_bytes, first.temperature_c) == (20 * GIB, 31)  # of its GPU
    assert first.compute_capability == "9.0"
    assert found.gpus[2].unavailable == "MIG mode is on and has no instance"
    driver.show(mig_gpu(1, {}))
    assert driver.run(discover).why_none == "GPU 0: MIG mode is on and has no instance"


def test_a_gpu_that_falls_off_the_bus_while_it_is_watched(driver: DriverOn) -> None:
    driver.show(gpu(0), gpu(1))
    assert len(driver.run(discover).usable) == 2
    driver.show(gpu(0), LOST)
    found = driver.run(discover)
    assert [one.label for one in found.usable] == ["0"]
    assert found.gpus[1].unavailable == "GPU is lost"
    driver.show(LOST)
    assert driver.run(discover).why_none == "GPU 0: GPU is lost"


def discover_anew() -> str:
    """Why there is no GPU, in a process that has asked the driver nothing before."""
    nvml.driver.cache_clear()
    why = discover().why_none
    nvml.driver.cache_clear()
    return why


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (MISMATCH, "the NVIDIA driver fails (RM has detected an NVML/RM version mismatch)"),
        ("!12", "no NVIDIA driver"),
    ],
)
def test_a_driver_that_is_missing_or_fails(driver: DriverOn, said: str, shown: str) -> None:
    driver.show(gpu(0), init=said)
    assert driver.run(discover_anew) == shown


def test_gpus_of_other_jobs_have_no_index(driver: DriverOn) -> None:
    """As under Slurm, where the driver counts what a cgroup hides, and CUDA does not."""
    hidden = gpu(0, handle=NO_PERMISSION)
    driver.show(hidden, gpu(1), hidden, gpu(3))
    assert [one.label for one in driver.run(discover, CUDA_VISIBLE_DEVICES="1,0").usable] == [
        "3",
        "1",
    ]
    assert driver.run(discover).gpus[0].unavailable == "Insufficient Permissions"


def test_a_gpu_for_one_process_is_free_or_not(driver: DriverOn) -> None:
    driver.show(gpu(0, compute_mode=3), gpu(1, compute_mode=3, compute={ME: GIB}))
    found = driver.run(discover)
    assert [one.label for one in found.usable] == ["0"]
    whose = f"{psutil.Process().name()} {ME}"
    assert f"its compute mode is EXCLUSIVE_PROCESS, and {whose} (" in found.gpus[1].unavailable
