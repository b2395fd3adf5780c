"""Which GPUs there are and who uses them, read by NVIDIA's own package from a driver of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpupool.core.machine import gpus as module
from gpupool.core.machine.gpus import GpuTable, discover, read_gpus, use_of, why_torch_cannot
from gpupool.notebook.objects import gpu_table_html
from gpupool.notebook.page import markup
from tests.servers.nvidia_driver import (
    GIB,
    LOST,
    MISMATCH,
    NO_PERMISSION,
    UNSEEN_PID,
    DriverOn,
    gpu,
    mig_gpu,
    process_of_another_user,
)

ME = os.getpid()
OTHER = "nobody" if os.geteuid() == 0 else "root"  # see process_of_another_user
ANOTHERS = f"in use by {OTHER}"
UNSEEN = "in use by a process that cannot be seen from here"
FULL = (57 * GIB, 141 * GIB)  # less than half of it


def test_who_uses_a_gpu(driver: DriverOn) -> None:
    with process_of_another_user() as pid:
        driver.show(
            gpu(0),
            gpu(1, memory=FULL, compute={pid: FULL[0], ME: GIB}),
            gpu(2, memory=FULL, compute={pid: None}),  # whose memory is hidden
            gpu(3, memory=FULL, compute={UNSEEN_PID: FULL[0]}),  # of another container
            gpu(4, memory=FULL),  # of one that the driver does not show at all
            gpu(5, memory=FULL, compute={ME: FULL[0]}),
            gpu(6, memory=(GIB, 80 * GIB), graphics={pid: GIB}),  # a desktop
            gpu(7, memory=(GIB, 80 * GIB)),  # the driver's own
        )
        gpus, _ = driver.run(read_gpus)
    expected = ["", ANOTHERS, ANOTHERS, UNSEEN, UNSEEN, "in use by you", "", ""]
    assert list(map(use_of, gpus)) == expected
    assert "57.0 of 141.0 GiB" in repr(GpuTable(gpus))
    free, used, *_ = gpu_table_html(GpuTable(gpus)).split("</tr>")[1:]
    assert ">available<" in free
    assert markup.AMBER not in free
    assert f"1px solid {markup.AMBER}" in used
    assert "available" not in used
    # what a rank of this notebook has is its own, perhaps unseen; not so what is shared by --force
    ours = GpuTable(gpus, {one.uuid: f"rank {one.index}" for one in gpus})
    uses = [use_of(one, one.uuid in ours.selected) for one in gpus]
    assert uses == ["", ANOTHERS, ANOTHERS, *[""] * 5]
    html = gpu_table_html(ours)
    assert html.count(ANOTHERS) == 2
    assert all(f">rank {n}<" in html for n in range(8))


@pytest.mark.parametrize("cuda", [None, "12.8"])
def test_a_torch_for_cpus_cannot_use_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it takes seconds')")
    (package / "version.py").write_text(f"debug = False\ncuda: Optional[str] = {cuda!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert ("built without CUDA" in why_torch_cannot()) is (cuda is None)


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
    driver.show()
    assert driver.run(discover).why_none == "the NVIDIA driver finds no GPU"


def discover_anew() -> str:
    """Why there is no GPU, in a process that has asked the driver nothing before."""
    module.driver.cache_clear()
    why = discover().why_none
    module.driver.cache_clear()
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
