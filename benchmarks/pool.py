"""Start of a pool and round trip of a trivial cell, beside ipyparallel doing the same.

    python benchmarks/pool.py [--ranks 2] [--rounds 3] [--cells 200]

"Started" means everywhere: torch imported on every rank, process group formed, one all-reduce done.
The variants take turns in every round; medians are printed. Trust the ratios: other users of the
machine slow all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ipyparallel
from traitlets.config import Config

import gpupool

RunCell = Callable[[], object]

FORM = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore({path!r}, {n}), rank={rank}, world_size={n})
dist.all_reduce(torch.ones(1))
"""
TUNED = {
    "Cluster": {"delay": 0.0},
    "LocalEngineSetLauncher": {"delay": 0.0},
    "HeartMonitor": {"period": 200},
}


@contextmanager
def ours(n: int) -> Iterator[RunCell]:
    """gpupool."""
    with gpupool.start(n=n, device="cpu") as pool:
        pool.run("dist.all_reduce(torch.ones(1))")
        yield lambda: pool.run("1")


@contextmanager
def plain(n: int, settings: dict[str, Any]) -> Iterator[RunCell]:
    """An ipyparallel cluster whose engines form the group themselves."""
    cluster = ipyparallel.Cluster(n=n, config=Config(settings), log_level=40)
    if settings:
        cluster.controller_args = ["--HeartMonitor.period=200", "--nodb"]
    client = cluster.start_and_connect_sync(activate=False)
    try:
        client.wait_for_engines(n, timeout=60, interactive=False)
        with tempfile.TemporaryDirectory() as folder:
            sources = [FORM.format(path=f"{folder}/store", n=n, rank=rank) for rank in range(n)]
            pending = [client[rank].execute(source) for rank, source in enumerate(sources)]
            for result in pending:
                result.get()
        view = client[:]
        yield lambda: view.execute("1", silent=False, block=True)
    finally:
        cluster.stop_cluster_sync()


def measure(variant: Any, num_cells: int) -> tuple[float, float]:
    """Seconds to start, and the median of a cell's seconds."""
    began = time.perf_counter()
    with variant as run_cell:
        start_s = time.perf_counter() - began
        cells = []
        for _ in range(num_cells):
            began = time.perf_counter()
            run_cell()
            cells.append(time.perf_counter() - began)
    return start_s, statistics.median(cells)


def main() -> None:
    """Run all variants in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cells", type=int, default=200)
    chosen = parser.parse_args()
    n = chosen.ranks
    variants = {
        "gpupool": lambda: ours(n),
        "ipyparallel, tuned": lambda: plain(n, TUNED),
        "ipyparallel, as it comes": lambda: plain(n, {}),
    }
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(chosen.rounds):
        for name, make in variants.items():
            rows[name].append(measure(make(), chosen.cells))
    medians = {
        name: [statistics.median(column) for column in zip(*values, strict=True)]
        for name, values in rows.items()
    }
    base = medians["gpupool"]
    print(f"\n{n} CPU ranks, median of {chosen.rounds} rounds\n")
    print("| variant | started, s | ratio | trivial cell, ms | ratio |\n|---|---|---|---|---|")
    for name, (start_s, cell_s) in medians.items():
        print(
            f"| {name} | {start_s:.1f} | {start_s / base[0]:.1f} "
            f"| {1000 * cell_s:.1f} | {cell_s / base[1]:.1f} |"
        )


if __name__ == "__main__":
    main()
