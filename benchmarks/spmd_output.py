"""Printing and memory of cells, beside %%px and raw ipyparallel doing the same.

    python benchmarks/spmd_output.py [--lines 200000] [--rounds 3] [--cells 2000]

Lines: what a loop of prints costs a rank, in seconds on the rank; "plain Python" prints into a
pipe that somebody reads. The variants take turns in every round; medians are printed, and ratios to
raw ipyparallel. Trust the ratios: other users of the machine slow all alike.

Flood: a cell that prints 100 MB on each of two ranks; what the notebook's kernel publishes.

Memory: a real kernel runs many trivial cells; bytes per cell that stay allocated in it
(tracemalloc, and its resident memory), from the 500th cell on. "1" is a cell without a pool.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

NUM_RANKS = 2
LOOP = """
import time as _time
_began = _time.perf_counter()
for _n in range({num_lines}):
    print("line", _n, "loss 0.12345")
_took = _time.perf_counter() - _began
"""
FLOOD = (
    "%%spmd -o said\ns = 'x' * 99\nfor i in range(1_000_000):\n    print(s)\nprint('last', rank)"
)
IPYPARALLEL = """
import ipyparallel as ipp
cluster = ipp.Cluster(n=2, log_level=40)
client = cluster.start_and_connect_sync(activate=True)
"""
GPUPOOL = "%load_ext gpupool\n%gpupool start -n 2 --cpu"
MEMORY = {  # name: (what the kernel runs first, the cell, what it runs last)
    "%%spmd": (GPUPOOL, "%%spmd\n1", "%gpupool stop"),
    "%%px": (IPYPARALLEL, "%%px\n1", "cluster.stop_cluster_sync()"),
    "1": ("pass", "1", "pass"),
}
BEGIN_TRACE = "import gc, tracemalloc; tracemalloc.start()"
TRACED = "gc.collect(); print(tracemalloc.get_traced_memory()[0])"
WARM_UP_CELLS = 500

RunLoop = Callable[[str], float]


@contextmanager
def spmd() -> Iterator[RunLoop]:
    """`%%spmd` in a shell."""
    import gpupool

    shell = new_shell()
    shell.run_cell("%load_ext gpupool")
    with gpupool.start(n=NUM_RANKS, device="cpu") as pool:

        def run(code: str) -> float:
            with contextlib.redirect_stdout(io.StringIO()):
                shell.run_cell(f"%%spmd\n{code}").raise_error()
            return max(pool.run("_took").values())

        yield run


@contextmanager
def raw() -> Iterator[RunLoop]:
    """ipyparallel's `execute`, waited for."""
    with cluster_view() as view:

        def run(code: str) -> float:
            view.execute(code, silent=False, block=True)
            return float(max(view["_took"]))

        yield run


@contextmanager
def px() -> Iterator[RunLoop]:
    """`%%px` in a shell, which shows what comes."""
    with cluster_view() as view:
        shell = new_shell()
        view.activate()

        def run(code: str) -> float:
            with contextlib.redirect_stdout(io.StringIO()):
                shell.run_cell(f"%%px\n{code}").raise_error()
            return float(max(view["_took"]))

        yield run


@contextmanager
def plain() -> Iterator[RunLoop]:
    """Processes of plain Python, as many as ranks."""

    def run(code: str) -> float:
        command = [sys.executable, "-c", f"{code}\nimport sys\nprint(_took, file=sys.stderr)"]
        pipe = subprocess.PIPE
        running = [
            subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(NUM_RANKS)
        ]
        return max(float(process.communicate()[1]) for process in running)

    yield run


LINES: dict[str, Callable[[], Any]] = {
    "%%spmd": spmd,
    "%%px": px,
    "raw ipyparallel": raw,
    "plain Python": plain,
}


@contextmanager
def cluster_view() -> Iterator[Any]:
    """A view of an ipyparallel cluster as it comes."""
    import ipyparallel

    cluster = ipyparallel.Cluster(n=NUM_RANKS, log_level=40)
    client = cluster.start_and_connect_sync(activate=False)
    try:
        client.wait_for_engines(NUM_RANKS, timeout=120, interactive=False)
        yield client[:]
    finally:
        cluster.stop_cluster_sync()


def new_shell() -> Any:
    """The shell of this process, without a history file."""
    from IPython.terminal.interactiveshell import TerminalInteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    return TerminalInteractiveShell.instance(config=config)


def lines_table(num_lines: int, rounds: int) -> str:
    """What the loop costs in each variant, as Markdown."""
    found: dict[str, list[float]] = {name: [] for name in LINES}
    code = LOOP.format(num_lines=num_lines)
    with contextlib.ExitStack() as stack:
        runs = {name: stack.enter_context(variant()) for name, variant in LINES.items()}
        for _ in range(rounds):
            for name, run in runs.items():
                found[name].append(run(code))
    base = statistics.median(found["raw ipyparallel"])
    rows = [
        f"| {name} | {statistics.median(times):.2f} | {statistics.median(times) / base:.2f} |"
        for name, times in found.items()
    ]
    head = f"\n{num_lines} lines on each of {NUM_RANKS} ranks, median of {rounds} rounds\n\n"
    return head + "\n".join(["| variant | s on the rank | ratio |", "|---|---|---|", *rows])


def flood_text() -> str:
    """What a kernel publishes while two ranks print 100 MB each."""
    from tests.notebook.kernel import Kernel

    with Kernel() as kernel:
        kernel.run(GPUPOOL)
        process = psutil.Process(kernel.manager.provisioner.process.pid)
        before = process.memory_info().rss
        cell = kernel.run(FLOOD, timeout_s=300)
        grown = process.memory_info().rss - before
        published = sum(len(str(content)) for _, _, content in cell.messages)
        ends = [kernel.run(f"print(said.text({rank})[-7:])").text for rank in range(NUM_RANKS)]
        kernel.run("%gpupool stop")
    return (
        f"\n100 MB on each of {NUM_RANKS} ranks: the cell ended {cell.status!r} after "
        f"{cell.elapsed_s:.1f} s; {len(cell.messages)} messages, {published / 1e3:.0f} kB; the "
        f"kernel grew by {grown / 2**20:.0f} MiB; the last lines are {ends}."
    )


def memory_table(num_cells: int) -> str:
    """Bytes that a trivial cell leaves in the kernel, as Markdown."""
    rows = []
    for name in MEMORY:
        command = [sys.executable, __file__, "--one", name, "--cells", str(num_cells)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(done.stdout.splitlines()[-1])
    head = f"\nTrivial cells {WARM_UP_CELLS} to {num_cells}, bytes that stay for each\n\n"
    return head + "\n".join(["| cell | allocated | resident |", "|---|---|---|", *rows])


def memory_row(name: str, num_cells: int) -> str:
    """One row of `memory_table`, measured in a kernel of its own."""
    from tests.notebook.kernel import Kernel

    first, source, last = MEMORY[name]
    with Kernel() as kernel:
        kernel.run(first, timeout_s=120)
        kernel.run(BEGIN_TRACE)
        process = psutil.Process(kernel.manager.provisioner.process.pid)
        for _ in range(WARM_UP_CELLS):
            kernel.run(source)
        before = int(kernel.run(TRACED).text), process.memory_info().rss
        for _ in range(num_cells - WARM_UP_CELLS):
            kernel.run(source)
        after = int(kernel.run(TRACED).text), process.memory_info().rss
        kernel.run(last)
    num_counted = num_cells - WARM_UP_CELLS
    allocated, resident = ((b - a) / num_counted for a, b in zip(before, after, strict=True))
    return f"| `{name}` | {allocated:.0f} | {resident:.0f} |"


def main() -> None:
    """Run all parts and print what they find."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cells", type=int, default=2000)
    parser.add_argument("--one", choices=MEMORY, help="the memory of one variant only")
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if chosen.one:
        print(memory_row(chosen.one, chosen.cells))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["IPYTHONDIR"] = folder
        print(lines_table(chosen.lines, chosen.rounds), flush=True)
        print(flood_text(), flush=True)
        print(memory_table(chosen.cells))


if __name__ == "__main__":
    main()
