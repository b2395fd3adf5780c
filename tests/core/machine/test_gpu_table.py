"""The GPUs as text."""

from __future__ import annotations

import os

import gpupool
from gpupool.core.machine.gpus import GpuTable
from gpupool.core.machine.topology import Gpu, GpuProcess
from gpupool.core.machine.uses import Use

BUSY = Gpu(
    index=0,
    uuid="GPU-0",
    name="NVIDIA H200",
    total_memory_bytes=141 * 2**30,
    used_memory_bytes=3 * 2**29,
    utilization_percent=7,
    temperature_c=41,
    compute_capability="9.0",
    processes=(
        GpuProcess(4711, "python", "ada", None),
        GpuProcess(4712, "gpupool rank 0", "bob", 2**30),
    ),
)
UNKNOWN = Gpu(1, "GPU-1", "T4", unavailable="hidden by CUDA_VISIBLE_DEVICES")
TAKEN = Gpu(3, "GPU-3", "NVIDIA H200", 141 * 2**30, 57 * 2**30)
INSTANCE = Gpu(2, "MIG-2", "A100 MIG 1g.5gb", mig_index=1)
TABLE = GpuTable(
    [BUSY, UNKNOWN, INSTANCE, TAKEN],
    {"GPU-0": "rank 0"},
    uses={"GPU-3": Use("in use by alice", is_taken=True)},
)


def test_the_table_shows_what_is_known_and_a_dash_for_the_rest() -> None:
    *rows, taken = TABLE.rows()
    assert taken[6] == "no: in use by alice"
    assert rows == [
        (
            "0",
            "NVIDIA H200",
            "9.0",
            "1.5 of 141.0 GiB",
            "7 %",
            "41 °C",
            "yes",
            "rank 0",
            "python 4711 (ada, - GiB), gpupool rank 0 4712 (bob, 1.0 GiB)",
            "GPU-0",
        ),
        (
            "1",
            "T4",
            "-",
            "-",
            "-",
            "-",
            "no: hidden by CUDA_VISIBLE_DEVICES",
            "-",
            "-",
            "GPU-1",
        ),
        ("2:1", "A100 MIG 1g.5gb", "-", "-", "-", "-", "yes", "-", "-", "MIG-2"),
    ]
    header, first, *_ = repr(TABLE).splitlines()
    assert header.split() == [
        "index", "name", "capability", "memory", "utilization", "temperature", "available",
        "selected", "held", "by", "uuid",
    ]  # fmt: skip
    assert first.startswith("0      NVIDIA H200      9.0         1.5 of 141.0 GiB   7 %")


def test_a_table_without_rows_is_a_sentence() -> None:
    assert repr(GpuTable(why_none="no NVIDIA driver")) == "No GPU: no NVIDIA driver."
    assert repr(GpuTable()) == "No GPU."


def test_nothing_visible_is_said() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    table = gpupool.gpus()
    assert table.why_none
    # hidden GPUs are in the table, marked; without a driver there are none
    assert all(gpu.unavailable for gpu in table)
    assert len(table) or repr(table).startswith("No GPU: ")
