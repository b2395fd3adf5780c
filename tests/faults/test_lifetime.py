"""Engines live as long as their notebook, and a moment longer: three seconds on an idle machine."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import gpupool
from gpupool.pool import session
from tests.notebook.kernel import Kernel
from tests.support.processes import family, folder_of, gone, notebook, reach, reached, until

START = "%load_ext gpupool\n%gpupool start --cpu -n 2"
FAMILY = """
import json, os
from gpupool import current_pool
from tests.support.processes import family, folder_of
everyone = {name: process.pid for name, process in family(current_pool()).items()}
print(json.dumps([os.getpid(), everyone, str(folder_of(current_pool()).parent)]))
"""
ROOT = Path(__file__).parents[2]
GONE_S = 3.0  # on an idle machine


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with Kernel(PYTHONPATH=str(ROOT)) as kernel:
        yield kernel


def started(kernel: Kernel) -> tuple[int, dict[str, int], str]:
    """Start a pool; pid of the kernel, name -> pid of the pool's processes, their folder."""
    kernel.run(START)
    pid, pids, folder = json.loads(kernel.run(FAMILY).text)
    return pid, pids, folder


# ---- the kernel ends -------------------------------------------------------------------------


def test_a_kernel_killed_during_the_start_leaves_nothing(kernel: Kernel) -> None:
    kernel_pid = int(kernel.run("import os; os.getpid()").text)
    kernel.client.execute(START)
    process = psutil.Process(kernel_pid)
    until(lambda: bool(process.children()), 10.0, "the start of the starter")
    time.sleep(0.4)
    children = process.children(recursive=True)
    os.kill(kernel_pid, signal.SIGKILL)
    until(lambda: gone(*(child.pid for child in children)), GONE_S, "the end of all processes")


def test_a_kernel_that_is_restarted_or_killed_leaves_nothing(
    kernel: Kernel, tmp_path: Path
) -> None:
    """It can start again; it is killed while one rank stands still and the other computes."""
    _, pids, _ = started(kernel)
    kernel.manager.restart_kernel()
    kernel.client.wait_for_ready(timeout=60)
    until(lambda: gone(*pids.values()), GONE_S, "the end of all processes")

    killed, pids, folder = started(kernel)
    assert {"starter", "controller", "rank 0", "rank 1"} <= pids.keys()
    begun = tmp_path / "rank"
    kernel.client.execute(
        f"%%spmd\n{reach(begun)}\nif rank == 0:\n    dist.barrier()\nelse:\n    while 1: pass"
    )
    until(lambda: reached(begun, 0, 1), 20.0, "its beginning")
    os.kill(pids["rank 0"], signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    until(lambda: gone(*pids.values()), GONE_S, "the end of all processes")
    until(lambda: not Path(folder).exists(), GONE_S, "the folder's removal")


INTERRUPTED = """
import signal, time
import psutil
from gpupool.pool.launchers import starter
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
signal.signal(signal.SIGINT, signal.default_int_handler)
starter.warm(); starter.close()  # imports what the next one needs
kept = []  # as IPython keeps the last traceback, and what its frames hold
for moment in range(20):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0003 + 0.0004 * moment)
        starter.warm()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt as error:
        kept.append(error)
    starter.close()
print(len(kept) > 0, psutil.Process().children())
"""


def test_an_interrupt_at_any_moment_of_its_start_loses_no_starter() -> None:
    output, _ = notebook(INTERRUPTED).communicate(timeout=60)
    assert output.splitlines()[-1] == "True []"


# ---- the starter ends first --------------------------------------------------------------------

STARTS = "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\nchild.pid"


def test_without_a_starter_the_notebook_ends_what_the_ranks_had_started() -> None:
    session.stop()
    pool = gpupool.start(n=2, device="cpu")
    everyone = family(pool)
    pids = [*(process.pid for process in everyone.values()), *pool.run(STARTS).values()]
    folder = folder_of(pool).parent
    everyone["starter"].kill()
    until(lambda: gone(*pids), GONE_S, "the end of all processes")
    until(lambda: not folder.exists(), GONE_S)
    pool.stop()
