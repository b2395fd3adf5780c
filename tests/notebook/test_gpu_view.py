"""The GPUs as a picture, and watched live: in a notebook, on a terminal and in a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pexpect
import pytest

from gpupool.core.machine.gpus import GpuTable
from gpupool.core.machine.topology import NO_DRIVER, Gpu, GpuProcess, survey
from gpupool.notebook.gpu_view import gpu_table_html
from tests.notebook.kernel import Kernel
from tests.servers.nvidia_driver import LOST, DriverOn, gpu

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

# Three tables, and then the user presses Ctrl-C. On a terminal of 40 columns they are cut.
WATCH = """
import os, signal, sys
from gpupool.core.machine.gpus import GpuTable
from gpupool.core.machine.topology import Gpu
from gpupool.notebook.gpu_view import Watch
num_gpus = int(sys.argv[1])
loads = iter([10, 20, 30])
def look():
    load = next(loads, None)
    if load is None:
        os.kill(os.getpid(), signal.SIGINT)
    name = "NVIDIA H200 " + "x" * 60
    gpus = [Gpu(n, "GPU-0", name, utilization_percent=load) for n in range(num_gpus)]
    instead = "A pool has 2 CPU ranks then, or as many as you like."
    return GpuTable(gpus, why_none="no NVIDIA driver", instead=instead)
Watch(look, every_s=0.01).run()
print("goes on")
"""


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
    unknown = replace(GPU, used_memory_bytes=None, utilization_percent=None, temperature_c=None)
    html = gpu_table_html(GpuTable([unknown]))
    assert "background:" not in html
    assert "- of 100.0 GiB" in html
    assert ">available<" in html


def test_mig_instances_and_gpus_that_cannot_be_used() -> None:
    instance = Gpu(0, "MIG-1", "NVIDIA A100 MIG 3g.20gb", mig_index=1)
    found = survey([replace(GPU, instances=(instance,)), Gpu(1, "GPU-1", "T4")], "", "MIG-1")
    html = gpu_table_html(GpuTable(found.gpus))
    assert ">0:1<" in html
    assert "61 °C" in html  # of its GPU
    assert "no: hidden by CUDA_VISIBLE_DEVICES" in html


def test_where_there_is_none_it_says_why_and_what_is_used_instead() -> None:
    table = GpuTable(why_none=NO_DRIVER, instead="The pool has 2 CPU ranks of 4 threads each.")
    sentence = "No GPU: no NVIDIA driver. The pool has 2 CPU ranks of 4 threads each."
    assert repr(table) == sentence
    assert sentence in gpu_table_html(table)


def watched_on_terminal(term: str, num_gpus: int = 1) -> str:
    """What a terminal of 40 columns and 24 lines gets."""
    child = pexpect.spawn(
        sys.executable,
        ["-c", WATCH, str(num_gpus)],
        env={**os.environ, "TERM": term, "COLUMNS": "40", "LINES": "24"},  # there may be some
        dimensions=(24, 40),
        encoding="utf-8",
        timeout=60,
    )
    child.expect(pexpect.EOF)
    assert child.wait() == 0  # close() hangs up on a process that is slow to end
    child.close()
    return str(child.before)


def test_on_a_terminal_the_table_is_drawn_over_the_last_one() -> None:
    shown = watched_on_terminal("xterm")
    *tables, last = shown.split("\x1b[2F\x1b[J")  # a table is two lines, and none of them wraps
    assert len(tables) == 3
    assert all(len(line) < 40 for table in tables for line in table.splitlines())
    header, gpu, after = last.splitlines()
    assert (header.split()[-1], gpu.split()[-1], after) == ("uuid", "GPU-0", "goes on")


LIVE = """
from gpupool.notebook.gpu_view import Watch
from gpupool.pool import session
Watch(session.gpus, every_s=0.05).run()
"""


def test_a_gpu_that_is_lost_while_the_table_is_watched(driver: DriverOn) -> None:
    driver.show(gpu(0), gpu(1))
    child = pexpect.spawn(
        sys.executable,
        ["-c", LIVE],
        env={**os.environ, **driver.variables, "TERM": "xterm", "COLUMNS": "300", "LINES": "24"},
        dimensions=(24, 300),
        encoding="utf-8",
        timeout=60,
    )
    child.expect(r"\x1b\[3F.*\x1b\[3F")  # drawn twice, so that NVML is open
    assert driver.calls().count("nvmlInit") == 1
    driver.show(gpu(0), LOST)
    child.expect("no: it has fallen off the bus")
    driver.show(gpu(0), gpu(1, name="NVIDIA H100 after a reset"))
    child.expect("NVIDIA H100 after a reset")
    child.sendintr()
    child.expect(pexpect.EOF)
    assert child.wait() == 0
    child.close()


def test_on_a_terminal_the_words_that_there_is_no_gpu_are_not_cut() -> None:
    words = "No GPU: no NVIDIA driver. A pool has 2 CPU ranks then, or as many as you like."
    first = watched_on_terminal("xterm", num_gpus=0).split("\x1b[")[0].splitlines()
    assert " ".join(first) == words
    assert all(len(line) < 40 for line in first)


def test_a_table_higher_than_the_screen_is_cut_until_its_end() -> None:
    shown = watched_on_terminal("xterm", num_gpus=40)
    first, second, third, last = shown.split("\x1b[23F\x1b[J")  # with the cursor's it is the screen
    for table in (first, second, third):
        assert len(table.splitlines()) == 23
        assert table.splitlines()[-1] == "... 19 more GPUs"
    assert [line.split()[0] for line in last.splitlines()] == [
        "index",
        *map(str, range(40)),
        "goes",
    ]


def test_where_nothing_may_move_the_table_is_shown_once() -> None:
    piped = subprocess.run(
        [sys.executable, "-c", WATCH, "1"], capture_output=True, text=True, check=True
    )
    for shown in (watched_on_terminal("dumb").replace("\r\n", "\n"), piped.stdout):
        assert "\x1b" not in shown
        header, gpu, last = shown.splitlines()
        assert header.startswith("index  name")
        assert "10 %" in gpu
        assert last == "goes on"
    assert piped.stderr == ""


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    clean_kernel.run("%load_ext gpupool")
    return clean_kernel


def test_in_a_notebook_it_is_drawn_again_until_the_stop_button(driver: DriverOn) -> None:
    driver.show(gpu(0))
    with Kernel(**driver.variables) as kernel:
        kernel.run("%load_ext gpupool")
        moved = [(lambda cell: len(cell.drawn) > 4, kernel.press_stop)]
        watched = kernel.run("%gpupool gpus --watch 0.05", meanwhile=moved)
        assert (watched.status, watched.errors) == ("ok", [])
        kinds = [kind for _, kind, _ in watched.messages]
        assert kinds.count("display_data") == 1
        (kept,) = watched.outputs
        assert kept["data"]["text/plain"] == kernel.run("%gpupool gpus").text
        assert "GPU-0" in kept["data"]["text/plain"]


def test_in_a_notebook_without_a_gpu_nothing_is_watched(kernel: Kernel) -> None:
    watched = kernel.run("%gpupool gpus --watch 0.05")
    assert (watched.status, watched.errors) == ("ok", [])
    assert watched.text == kernel.run("%gpupool gpus").text
    assert kernel.run("1 + 1").text == "2"
