"""Which GPUs there are and who uses them, as the driver in its C library shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpupool.core.machine.gpus import GpuTable, use_of
from gpupool.core.machine.nvml import read_gpus
from gpupool.notebook.objects import gpu_table_html
from gpupool.notebook.page import markup
from tests.servers.nvidia_driver import (
    GIB,
    UNSEEN_PID,
    DriverOn,
    gpu,
    install_torch,
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
    assert [use_of(one, one.uuid in ours.selected) for one in gpus] == [
        "",
        ANOTHERS,
        ANOTHERS,
        "",
        "",
        "",
        "",
        "",
    ]
    html = gpu_table_html(ours)
    assert html.count(ANOTHERS) == 2
    assert all(f">rank {n}<" in html for n in range(8))


LOOK = """
import sys
from gpupool.core.machine.gpus import why_torch_cannot
print(why_torch_cannot())
print("torch" in sys.modules)
"""


@pytest.mark.parametrize("cuda", [None, "12.8"])
def test_a_torch_for_cpus_cannot_use_a_gpu(tmp_path: Path, cuda: str | None) -> None:
    asked = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**os.environ, **install_torch(tmp_path, "2.15.0", cuda)},
        capture_output=True,
        text=True,
        check=True,
    )
    why, is_loaded = asked.stdout.splitlines()
    assert ("built without CUDA" in why) is (cuda is None)
    assert is_loaded == "False"
