"""Who else uses a GPU: as the driver in its C library shows it, and as locks do."""

from __future__ import annotations

import getpass
import os

from gpupool.core.machine.gpus import GpuTable
from gpupool.core.machine.locks import DeviceLocks, lock_folder, lock_owners
from gpupool.core.machine.nvml import read_gpus
from gpupool.core.machine.topology import Gpu, GpuProcess
from gpupool.core.machine.uses import Use, use_of, uses
from gpupool.notebook.gpu_view import gpu_table_html
from gpupool.notebook.page import markup
from gpupool.pool import session
from tests.servers.nvidia_driver import (
    GIB,
    UNSEEN_PID,
    DriverOn,
    gpu,
    process_of_another_user,
)

ME = os.getpid()
OTHER = "nobody" if os.geteuid() == 0 else "root"  # see process_of_another_user
ANOTHERS = Use(f"in use by {OTHER}", is_taken=True)
UNSEEN = Use("in use by a process that cannot be seen from here", is_taken=False)
OURS = Use("in use by you", is_taken=False)
FULL = (57 * GIB, 141 * GIB)  # less than half of it


def found_uses(driver: DriverOn) -> list[Use | None]:
    gpus, _ = driver.run(read_gpus)
    return [use_of(one, getpass.getuser()) for one in gpus]


def pictures(driver: DriverOn) -> tuple[GpuTable, list[str]]:
    """The table, and the lines of its text without the header; the picture is looked at too."""
    table = driver.run(session.gpus)
    return table, repr(table).splitlines()[1:]


def test_a_card_with_57_gib_of_another_users_is_never_called_available(driver: DriverOn) -> None:
    with process_of_another_user() as pid:
        driver.show(gpu(0, memory=FULL, compute={pid: FULL[0]}), gpu(1))
        table, lines = pictures(driver)
        assert f"no: in use by {OTHER}" in lines[0]
        assert f" {pid} (" in lines[0]
        assert "57.0 of 141.0 GiB" in lines[0]
        used, free = gpu_table_html(table).split("</tr>")[1:3]
        assert f"1px solid {markup.AMBER}" in used
        assert f"in use by {OTHER}" in used
        assert "available" not in used
        assert markup.GREEN not in used
        assert ">available<" in free
        assert markup.AMBER not in free


def test_who_uses_a_gpu(driver: DriverOn) -> None:
    with process_of_another_user() as pid:
        driver.show(
            gpu(0),
            gpu(1, memory=FULL, compute={pid: FULL[0], ME: GIB}),
            gpu(2, memory=FULL, compute={pid: None}),  # whose memory is hidden
            gpu(3, memory=FULL, compute={UNSEEN_PID: FULL[0]}),  # of another container
            gpu(4, memory=FULL),  # of one that the driver does not show at all
            gpu(5, memory=FULL, compute={ME: FULL[0]}),
            gpu(6, memory=(GIB, 80 * GIB), graphics={pid: GIB}, compute={pid: GIB}),  # a desktop
            gpu(7, memory=(GIB, 80 * GIB)),  # the driver's own
        )
        expected = [None, ANOTHERS, ANOTHERS, UNSEEN, UNSEEN, OURS, None, None]
        assert found_uses(driver) == expected


def test_a_server_of_mps_is_nobodys_use() -> None:
    server = GpuProcess(4711, "nvidia-cuda-mps-server", "root", 30 * 2**20)
    assert use_of(Gpu(0, "GPU-0", "H100", processes=(server,)), "ada") is None


def test_what_another_pool_has_locked_is_in_use(driver: DriverOn) -> None:
    driver.show(gpu(0), gpu(1))
    uuid = str(gpu(0)["uuid"])
    locks = DeviceLocks(lock_folder())
    assert locks.take([uuid], 1) == ([uuid], {})
    try:
        assert lock_owners([uuid, "GPU-nobodys"])[uuid].get("pid") == ME
        table, lines = pictures(driver)
        assert table.uses == {uuid: Use("in use by another pool", is_taken=True)}
        assert "no: in use by another pool" in lines[0]
        assert lock_owners([uuid])  # asking has not taken it
    finally:
        locks.release()
    assert driver.run(session.gpus).uses == {}


def test_what_a_rank_of_this_notebook_has_is_its_own(driver: DriverOn) -> None:
    with process_of_another_user() as pid:
        driver.show(
            gpu(0, memory=FULL, compute={ME: FULL[0]}),
            gpu(1, memory=FULL),  # as in a container, which does not see its own either
            gpu(2, memory=FULL, compute={ME: GIB, pid: GIB}),  # shared, by --force
        )
        gpus, _ = driver.run(read_gpus)
        ranks = {one.uuid: f"rank {one.index}" for one in gpus}
        shared = uses(gpus, list(ranks))
        assert shared == {gpus[2].uuid: ANOTHERS}
        html = gpu_table_html(GpuTable(gpus, ranks, uses=shared))
        assert html.count(f"in use by {OTHER}") == 1
        assert all(f">rank {n}<" in html for n in range(3))
