"""The GPUs as a picture."""

from __future__ import annotations

from dataclasses import replace

from gpupool.core.machine.gpus import GpuTable
from gpupool.core.machine.topology import Gpu, GpuProcess
from gpupool.notebook.gpu_view import gpu_table_html

GIB = 2**30
GPU = Gpu(
    index=0,
    uuid="GPU-11f0c3a2-77aa-4b1e-9d33-10badc0ffee1",
    name="NVIDIA H200",
    total_memory_bytes=100 * GIB,
    used_memory_bytes=25 * GIB,
    utilization_percent=90,
    temperature_c=61,
    processes=(GpuProcess(4711, "python <b>", "ada", 25 * GIB),),
    compute_capability="9.0",
)


def test_shares_are_bars_beside_words() -> None:
    html = gpu_table_html(GpuTable([GPU], {GPU.uuid: "rank 3"}))
    assert "width:25%" in html
    assert "25.0 of 100.0 GiB" in html
    assert "width:90%" in html
    assert "90 %" in html
    assert "61 °C" in html
    assert ">rank 3<" in html
    assert "python &lt;b&gt; 4711 (ada, 25.0 GiB)" in html
    assert f'title="{GPU.uuid}"' in html


def test_what_the_driver_does_not_tell_has_no_bar() -> None:
    unknown = Gpu(0, GPU.uuid, GPU.name, total_memory_bytes=100 * GIB)
    html = gpu_table_html(GpuTable([unknown]))
    assert "background:" not in html
    assert "- of 100.0 GiB" in html
    assert ">available<" in html


def test_mig_instances_and_gpus_that_cannot_be_used() -> None:
    instance = replace(GPU, mig_index=1)
    html = gpu_table_html(GpuTable([instance, Gpu(1, "GPU-1", "T4", unavailable="GPU is lost")]))
    assert ">0:1<" in html
    assert "no: GPU is lost" in html
