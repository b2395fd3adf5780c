"""A cell on two ranks, and variables that travel, beside `%%px` and ipyparallel's own calls.

    python benchmarks/spmd.py [--cells 100] [--rounds 5] [--mib 256]

All run on the same engines, in one real IPython shell, and take turns: `%%spmd`, then `%%px`, then
a blocking `execute` of a DirectView, and again. Medians of the wall time and of the CPU time of the
notebook's process are printed; trust the ratios. "20 variables" reads 20 numbers and strings of
the notebook, one of which has changed since the cell before; `%%px` has none of them. The array
is new in every round, and then used a second time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import gpupool

WARM_UP = 10  # cells that are not counted
VARIABLES = ", ".join(f"v{number}" for number in range(20))
CELLS = {
    "%%px": "%%px\npass",
    "DirectView.execute": "view.execute('pass', block=True)",
    "%%spmd": "%%spmd\npass",
    "%%spmd --isolate": "%%spmd --isolate\npass",
    "%%spmd, 20 variables": f"%%spmd\nused = ({VARIABLES})",
}


class Shell:
    """A real IPython shell with a pool, and ipyparallel's client on the same engines."""

    def __init__(self) -> None:
        self.shell = InteractiveShell.instance()
        self.run("%load_ext gpupool\n%gpupool start -n 2 --cpu")
        self.pool = gpupool.current_pool()
        self.names["client_file"] = self.pool.connection_file
        self.run(
            "import ipyparallel\nview = ipyparallel.Client(client_file)[:]\n"
            "view.block = True\nview.activate()"
        )
        self.names.update({f"v{number}": f"text {number}" for number in range(20)})

    @property
    def names(self) -> dict[str, Any]:
        """The notebook's names."""
        return self.shell.user_ns

    def run(self, cell: str) -> None:
        """Run a cell; nothing is shown."""
        with capture_output():
            ran = self.shell.run_cell(cell, store_history=True)
        ran.raise_error()

    def measure(self, cell: str) -> tuple[float, float]:
        """(wall, CPU) milliseconds of a cell."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.run(cell)
        return 1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - cpu)


def trivial_cells(shell: Shell, num_cells: int) -> dict[str, tuple[float, float]]:
    """name -> median (wall, CPU) milliseconds of a cell that does next to nothing."""
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in CELLS}
    for number in range(WARM_UP + num_cells):
        shell.names["v7"] = number
        for name, cell in CELLS.items():
            measured[name].append(shell.measure(cell))
    kept = {name: times[WARM_UP:] for name, times in measured.items()}
    return {
        name: (statistics.median(w for w, _ in times), statistics.median(c for _, c in times))
        for name, times in kept.items()
    }


def arrays(shell: Shell, mib: int, num_rounds: int) -> dict[str, float]:
    """name -> median wall milliseconds until both ranks have used a new array of that size."""
    variants: dict[str, Callable[[], object]] = {
        "DirectView.push": lambda: shell.run(
            "view.push({'pushed': array}, block=True)\nview.execute('pushed[0]', block=True)"
        ),
        "%%spmd, first use": lambda: shell.run("%%spmd\nfirst = array[0]"),
        "%%spmd, second use": lambda: shell.run("%%spmd\nfirst = array[0]"),
        "fetched from a rank": lambda: shell.run("back = pool['array'][0]"),
    }
    shell.names["pool"] = shell.pool
    measured: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(num_rounds):
        shell.names["array"] = np.random.default_rng().random(mib << 17)
        for name, use in variants.items():
            started = time.perf_counter()
            use()
            measured[name].append(1000 * (time.perf_counter() - started))
    return {name: statistics.median(times) for name, times in measured.items()}


def main() -> None:
    """Measure and print two tables, ready for RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cells", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256)
    chosen = parser.parse_args()
    shell = Shell()
    try:
        cells = trivial_cells(shell, chosen.cells)
        print("\n| cell | wall, ms | CPU of the notebook, ms | wall, ratio |\n|---|---|---|---|")
        for name, (wall, cpu) in cells.items():
            print(f"| {name} | {wall:.2f} | {cpu:.2f} | {wall / cells['%%px'][0]:.2f} |")
        found = arrays(shell, chosen.mib, chosen.rounds)
        print(f"\n| array of {chosen.mib} MiB on two ranks | ms | ratio |\n|---|---|---|")
        for name, wall in found.items():
            print(f"| {name} | {wall:.0f} | {wall / found['DirectView.push']:.3f} |")
    finally:
        shell.run("%gpupool stop")


if __name__ == "__main__":
    main()
