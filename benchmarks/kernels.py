"""The first cell of the day and a trivial cell in real kernels, as a front end sees them.

    python benchmarks/kernels.py [--ranks 2] [--rounds 5] [--cells 100] [--peers PYTHON]

Each start is a new kernel: it is up and idle, then the cell that brings up the ranks is sent, and
the clock runs until the kernel is idle again: torch imported on every rank, process group formed.
"From launch" begins when the kernel is launched, as one kind starts its ranks before any cell. The
variants take turns. CPU is of all processes of the kernel during the cell. nbdistributed does not
wait for its ranks: its figure is two seconds of sleep, and says nothing about them. A trivial cell
is `pass` on all ranks, sent when the last one is over; `%%px` runs on gpupool's engines, in the
same kernel.

PYTHON is an interpreter that has `jupyter-distributed` and `nbdistributed` beside what is needed
here. Trust the ratios: other users of the machine slow all alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

TIMEOUT_S = 120.0
WARM_UP = 10  # cells that are not counted
FORM = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
"""
PX = """
import ipyparallel
client = ipyparallel.Client(str(gpupool.current_pool()._all_ranks.engines._launch.client_file))
view = client[:]
view.block = True
view.activate()
"""
IPYKERNEL = "ipykernel_launcher"
# variant -> (module of the kernel, cell before the clock, the cell, seconds in between)
STARTS = {
    "import torch, no ranks": (IPYKERNEL, "", "import torch", 0.0),
    "gpupool": (IPYKERNEL, "", "%load_ext gpupool\n%gpupool start -n {n} --cpu", 0.0),
    "gpupool, warm": (IPYKERNEL, "%load_ext gpupool", "%gpupool start -n {n} --cpu", 8.0),
    "jupyter-distributed": ("jupyter_distributed.kernel", "", FORM, 0.0),
    "nbdistributed": (IPYKERNEL, "", "%load_ext nbdistributed\n%dist_init -n {n}", 0.0),
}
PEERS = ("jupyter-distributed", "nbdistributed")
CHECK = "import torch.distributed as dist\nassert dist.get_world_size() == {n}"


class Kernel:
    """A running kernel and its front end."""

    def __init__(self, python: str, module: str, n: int) -> None:
        self.launched = time.perf_counter()
        self.manager = KernelManager()
        argv = [python, "-m", module, "-f", "{connection_file}"]
        self.manager._kernel_spec = KernelSpec(argv=argv, language="python", display_name=module)
        env = {
            **os.environ,
            "JUPYTER_DISTRIBUTED_WORLD_SIZE": str(n),
            "PATH": f"{Path(python).parent}:{os.environ['PATH']}",  # nbdistributed runs `python`
        }
        self.manager.start_kernel(env=env)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT_S)
        self.pid = int(self.manager.provisioner.pid)

    def run(self, cell: str) -> float:
        """Seconds from sending a cell to reply and idle."""
        began = time.perf_counter()
        reply = self.client.execute_interactive(
            cell, timeout=TIMEOUT_S, output_hook=self._hear, allow_stdin=False
        )
        took = time.perf_counter() - began
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{cell!r}: {reply['content']}")
        return took

    def cpu_s(self) -> float:
        """What all its processes have used."""
        used = 0.0
        for process in [psutil.Process(self.pid), *psutil.Process(self.pid).children(True)]:
            used += sum(process.cpu_times()[:4])
        return used

    def _hear(self, message: dict[str, Any]) -> None:
        if message["msg_type"] == "error":
            print(*message["content"]["traceback"], sep="\n", file=sys.stderr)

    def close(self) -> None:
        """End it and what it has left."""
        left = psutil.Process(self.pid).children(recursive=True)
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        _, alive = psutil.wait_procs(left, timeout=10)
        for process in alive:
            process.kill()


@contextmanager
def kernel(python: str, module: str, n: int) -> Iterator[Kernel]:
    """A new kernel, ended in any case."""
    one = Kernel(python, module, n)
    try:
        yield one
    finally:
        one.close()


def start(python: str, name: str, n: int) -> tuple[float, float, float]:
    """(seconds, CPU seconds) from the cell to the group, in a new kernel; seconds from launch."""
    module, before, cell, pause_s = STARTS[name]
    with kernel(python, module, n) as one:
        one.run(before or "None")
        time.sleep(pause_s)
        cpu_s = one.cpu_s()
        took = one.run(cell.replace("{n}", str(n)))
        since_launch = time.perf_counter() - one.launched - pause_s
        cpu_s = one.cpu_s() - cpu_s
        if name not in ("import torch, no ranks", "nbdistributed"):
            magic = "%%spmd\n" if name.startswith("gpupool") else ""
            one.run(magic + CHECK.replace("{n}", str(n)))
        return took, cpu_s, since_launch


def trivial_cells(peers: str | None, n: int, num_cells: int) -> dict[str, list[float]]:
    """variant -> seconds of each cell; the kernels are all up, and take turns."""
    with (
        kernel(sys.executable, IPYKERNEL, n) as ours,
        kernel(peers or "", *_jd(n)) if peers else (_nothing()) as theirs,
    ):
        ours.run(STARTS["gpupool"][2].format(n=n))
        ours.run("import gpupool" + PX)
        variants = {"%%spmd": (ours, "%%spmd\npass"), "%%px": (ours, "%%px\npass")}
        variants["plain cell of the kernel"] = (ours, "pass")
        if theirs is not None:
            theirs.run(FORM)
            variants["jupyter-distributed"] = (theirs, "pass")
        found: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(num_cells + WARM_UP):
            for name, (one, cell) in variants.items():
                found[name].append(one.run(cell))
        return {name: took[WARM_UP:] for name, took in found.items()}


def _jd(n: int) -> tuple[str, int]:
    return STARTS["jupyter-distributed"][0], n


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


def main() -> None:
    """Measure and print two tables, ready for RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cells", type=int, default=100)
    parser.add_argument("--peers", help="an interpreter that has them")
    chosen = parser.parse_args()
    names = [name for name in STARTS if chosen.peers or name not in PEERS]
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for _ in range(chosen.rounds):
        for name, rows in found.items():
            python = chosen.peers if name in PEERS else sys.executable
            rows.append(start(python, name, chosen.ranks))
    print("\n| first cell | s, median (least) | of `import torch` | CPU, s | from launch (least) |")
    print("|---|---|---|---|---|")
    base = statistics.median(row[0] for row in found["import torch, no ranks"])
    for name, rows in found.items():
        took, cpu, whole = (statistics.median(row[k] for row in rows) for k in range(3))
        least, least_whole = (min(row[k] for row in rows) for k in (0, 2))
        ratio = f"{took / base:.2f} | {cpu:.2f} | {whole:.2f} ({least_whole:.2f})"
        print(f"| {name} | {took:.2f} ({least:.2f}) | {ratio} |", flush=True)
    cells = trivial_cells(chosen.peers, chosen.ranks, chosen.cells)
    print("\n| trivial cell | ms | of `%%px` |\n|---|---|---|")
    px = statistics.median(cells["%%px"])
    for name, times in cells.items():
        ms = 1000 * statistics.median(times)
        print(f"| {name} | {ms:.1f} | {ms / 1000 / px:.2f} |")


if __name__ == "__main__":
    main()
