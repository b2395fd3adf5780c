"""Start, stop, footprint and a trivial cell, beside ipyparallel and torchrun doing the same.

    python benchmarks/pool.py [--ranks 2 8] [--rounds 3] [--cells 100]

"Started" means everywhere: from the call to torch imported on every rank, process group formed and
one all-reduce done. Each measurement is a new process, as a new kernel is; the variants take turns
in every round; medians are printed. Trust the ratios: other users of the machine slow all alike.

gpupool, warm   `%load_ext gpupool` was some seconds ago: the starter has imported torch
gpupool, cold   the first use in a new kernel
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

RunCell = Callable[[], object]

FORM = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore({path!r}, {n}), rank={rank}, world_size={n})
dist.all_reduce(torch.ones(1))
"""
TORCHRUN = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.barrier()
if dist.get_rank() == 0:
    print("formed", flush=True)
import sys
sys.stdin.read()
"""
TUNED = {
    "Cluster": {"delay": 0.0},
    "LocalEngineSetLauncher": {"delay": 0.0},
    "IPEngine": {"enable_nanny": False},
}
IDLE_S = 5.0
COLUMNS = {
    "start_s": ("started, s", "{:.2f}"),
    "stop_s": ("stopped, s", "{:.2f}"),
    "cell_ms": ("trivial cell, ms", "{:.1f}"),
    "num_processes": ("processes", "{:.0f}"),
    "private_mib": ("private MiB an engine", "{:.0f}"),
    "idle_percent": ("idle, % of a core", "{:.1f}"),
    "starter_percent": ("of it the starter", "{:.1f}"),
}


@contextmanager
def gpupool_pool(n: int, warm: bool) -> Iterator[RunCell]:
    """gpupool, after `%load_ext` or without."""
    import gpupool

    with gpupool.start(n=n, device="cpu") as pool:
        pool.run("dist.all_reduce(torch.ones(1))")
        yield lambda: pool.run("1")


@contextmanager
def ipyparallel_cluster(n: int, settings: dict[str, Any]) -> Iterator[RunCell]:
    """An ipyparallel cluster whose engines form the group themselves."""
    import ipyparallel
    from traitlets.config import Config

    cluster = ipyparallel.Cluster(n=n, config=Config(settings), log_level=40)
    if settings:
        cluster.controller_args = ["--HeartMonitor.period=100", "--nodb"]
    client = cluster.start_and_connect_sync(activate=False)
    try:
        client.wait_for_engines(n, timeout=120, interactive=False)
        with tempfile.TemporaryDirectory() as folder:
            sources = [FORM.format(path=f"{folder}/store", n=n, rank=rank) for rank in range(n)]
            pending = [client[rank].execute(source) for rank, source in enumerate(sources)]
            for result in pending:
                result.get()
        view = client[:]
        yield lambda: view.execute("1", silent=False, block=True)
    finally:
        cluster.stop_cluster_sync()


@contextmanager
def torchrun(n: int) -> Iterator[None]:
    """torchrun: a script's start; there are no cells."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(TORCHRUN)
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={n}"]
        with subprocess.Popen(
            [*command, "--standalone", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == "formed\n"
            yield
            process.stdin.close()  # all ranks read it, and end


VARIANTS: dict[str, Callable[[int], Any]] = {
    "gpupool, warm": lambda n: gpupool_pool(n, warm=True),
    "gpupool, cold": lambda n: gpupool_pool(n, warm=False),
    "ipyparallel, tuned": lambda n: ipyparallel_cluster(n, TUNED),
    "ipyparallel, as it comes": lambda n: ipyparallel_cluster(n, {}),
    "torchrun": torchrun,
}


def measure(name: str, n: int, num_cells: int) -> dict[str, float]:
    """One start, some cells, some idle seconds, one stop, in this process."""
    if name == "gpupool, warm":
        import gpupool.pool.launchers.starter

        gpupool.pool.launchers.starter.warm()
        time.sleep(8.0)
    began = time.perf_counter()
    with VARIANTS[name](n) as run_cell:
        found = {"start_s": time.perf_counter() - began}
        if run_cell is not None:
            found["cell_ms"] = 1000 * statistics.median(timed(run_cell) for _ in range(num_cells))
        found |= footprint(n)
        began = time.perf_counter()
    return found | {"stop_s": time.perf_counter() - began}


def timed(call: RunCell) -> float:
    """Seconds that one call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def footprint(n: int) -> dict[str, float]:
    """Processes besides this one, their CPU while nothing happens, private memory of an engine."""
    processes = psutil.Process().children(recursive=True)
    starter = [p for p in processes if p.name() == "gpupool:starter"]
    before, began = (cpu_seconds(processes), cpu_seconds(starter)), time.perf_counter()
    time.sleep(IDLE_S)
    elapsed = time.perf_counter() - began
    used = cpu_seconds(processes) - before[0], cpu_seconds(starter) - before[1]
    private = [p.memory_full_info().uss for p in processes if is_engine(p)]
    assert len(private) == n, [p.cmdline() for p in processes]
    return {
        "num_processes": len(processes),
        "idle_percent": 100 * used[0] / elapsed,
        "private_mib": statistics.mean(private) / 2**20,
    } | ({"starter_percent": 100 * used[1] / elapsed} if starter else {})


def is_engine(process: psutil.Process) -> bool:
    """Whether this is the process of a rank."""
    command = " ".join(process.cmdline())
    ours = process.name().startswith("gpupool:rank")
    theirs = "-m ipyparallel.engine" in command and "nanny" not in command
    return ours or theirs or (command.endswith("script.py") and "distributed.run" not in command)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU time that these have used."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def in_new_process(name: str, n: int, num_cells: int) -> dict[str, float]:
    """`measure`, where nothing has been imported yet."""
    command = [
        sys.executable,
        __file__,
        "--one",
        name,
        "--ranks",
        str(n),
        "--cells",
        str(num_cells),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(n: int, rounds: int, num_cells: int) -> str:
    """All variants in turn, as Markdown."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, rows in found.items():
            rows.append(in_new_process(name, n, num_cells))
    lines = [
        "| variant | " + " | ".join(title for title, _ in COLUMNS.values()) + " | start, ratio |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    base = statistics.median(row["start_s"] for row in found["gpupool, warm"])
    for name, rows in found.items():
        cells = [
            form.format(statistics.median(row[key] for row in rows)) if key in rows[0] else "-"
            for key, (_, form) in COLUMNS.items()
        ]
        ratio = statistics.median(row["start_s"] for row in rows) / base
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {ratio:.1f} |")
    return f"\n{n} CPU ranks, median of {rounds} rounds\n\n" + "\n".join(lines)


def imports(rounds: int) -> str:
    """What a new Python pays for the names: seconds, the smallest of some tries."""
    tries = {
        "import torch": "import torch",
        "import gpupool": "import gpupool",
        "%load_ext gpupool": "shell.run_line_magic('load_ext', 'gpupool')",
    }
    shell = "from IPython.core.interactiveshell import InteractiveShell as S; shell = S.instance()"
    clock = "import time; t = time.perf_counter()"
    lines = []
    for title, code in tries.items():
        script = f"{shell}\n{clock}\n{code}\nprint(time.perf_counter() - t)"
        took = [
            float(subprocess.check_output([sys.executable, "-c", script], text=True).split()[-1])
            for _ in range(rounds + 1)
        ]
        lines.append(f"`{title}` {min(took[1:]):.2f} s")
    return "\n" + ", ".join(lines)


def main() -> None:
    """Run all variants in turn and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cells", type=int, default=100)
    parser.add_argument("--one", choices=VARIANTS, help="measure one variant here, once")
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if chosen.one:
        print(json.dumps(measure(chosen.one, chosen.ranks[0], chosen.cells)))
        return
    print(imports(chosen.rounds))
    for n in chosen.ranks:
        print(table(n, chosen.rounds, chosen.cells), flush=True)


if __name__ == "__main__":
    main()
