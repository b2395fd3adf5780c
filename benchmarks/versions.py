"""Two checkouts of gpupool beside each other: what users feel most, before and after a change.

    python benchmarks/versions.py BEFORE AFTER [--rounds 5]

BEFORE and AFTER are folders with a checkout each; both run in this environment. A measurement is
a new process, and the checkouts take turns, so that whatever else the machine does falls on both.
Printed are medians and their ratio. CPU times are those of the ranks, or of the notebook's process;
they are disturbed least.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

CELLS, WARM_UP, MIB, IMAGES, STEPS = 100, 10, 256, 400, 400
POINTS, PICTURES = 2000, 20
BAD = "if rank == 1:\n    raise ValueError('bad')\ndist.all_reduce(torch.ones(1))"
TOTAL = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"


def median_ms(act: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began)
    return 1000 * statistics.median(taken)


def of_pool(found: dict[str, float]) -> Any:
    """Starts: the second one finds the starter warm."""
    import gpupool

    for name in ("first start, s", "next start, s"):
        began = time.perf_counter()
        pool = gpupool.start(n=2, device="cpu")
        pool.run(TOTAL)
        found[name] = time.perf_counter() - began
        if name.startswith("first"):
            pool.stop()
    return pool


def of_cells(pool: Any, found: dict[str, float]) -> None:
    """A trivial cell, and a large array that is sent and then used again."""
    import numpy as np
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "gpupool")
    median_ms(lambda: shell.run_cell("%%spmd\npass"), WARM_UP)
    began = time.process_time()
    found["trivial cell, ms"] = median_ms(lambda: shell.run_cell("%%spmd\npass"), CELLS)
    found["trivial cell, CPU ms"] = 1000 * (time.process_time() - began) / CELLS
    shell.user_ns["array"] = np.random.default_rng(0).random(MIB << 17)
    for name in ("256 MiB, first use, ms", "256 MiB, second use, ms"):
        found[name] = median_ms(lambda: shell.run_cell("%%spmd\narray[0]"), 1)


def of_faults(pool: Any, found: dict[str, float]) -> None:
    """An error on one rank while the other waits for it, and the next all-reduce."""
    import gpupool

    def fails() -> None:
        try:
            pool.run(BAD, timeout_s=60)
        except gpupool.SpmdError:
            return
        raise AssertionError("nothing has failed")

    errors, repaired = [], []
    for _ in range(8):
        errors.append(median_ms(fails, 1))
        repaired.append(median_ms(lambda: pool.run(TOTAL), 1))
    found["fault to error, ms"] = statistics.median(errors)
    found["and to the next all-reduce, ms"] = statistics.median(repaired)


def of_training(pool: Any, found: dict[str, float]) -> None:
    """CPU a step of a tiny network on two ranks: what the loop costs besides the network."""
    import torch
    from torch.utils.data import TensorDataset

    import gpupool

    data = TensorDataset(torch.randn(16 * STEPS, 8), torch.randint(2, (16 * STEPS,)))
    options = gpupool.TrainingOptions(epochs=1, batch_size=16)

    def trained() -> float:
        gpupool.train(torch.nn.Linear(8, 2), data, options=options)
        used: dict[int, float] = dict(pool.run("import time; time.process_time()"))
        return sum(used.values())

    begun = trained()  # the first training imports what torch needs for one
    found["training step, CPU ms of both ranks"] = 1000 * (trained() - begun) / STEPS


def of_data(folder: Path, found: dict[str, float]) -> None:
    """JPEGs of a local folder, decoded."""
    from torch.utils.data import DataLoader

    import gpupool

    images = DataLoader(gpupool.ImageDatastore(str(folder)), IMAGES)
    list(images)
    began, used = time.perf_counter(), time.process_time()
    list(images)
    found["image read, ms"] = 1000 * (time.perf_counter() - began) / IMAGES
    found["image read, CPU ms"] = 1000 * (time.process_time() - used) / IMAGES


def of_monitor(found: dict[str, float]) -> None:
    """The picture of a training."""
    from gpupool.core.wire.events import StartEvent, StepEvent
    from gpupool.notebook.monitor import picture
    from gpupool.training.history import TrainingHistory

    history = TrainingHistory()
    history.add(StartEvent(1, POINTS, 16 * POINTS, 16, 2, "cpu", "gloo", POINTS))
    for step in range(1, POINTS + 1):
        history.add(StepEvent(step, 1, 1 / step, 0.5, 0.1, 16, step / 10))
    began = time.process_time()
    for _ in range(PICTURES):
        picture.history_html(history)
    found["picture of the monitor, CPU ms"] = 1000 * (time.process_time() - began) / PICTURES


def measure(folder: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    pool = of_pool(found)
    of_cells(pool, found)
    of_faults(pool, found)
    of_training(pool, found)
    of_data(folder, found)
    of_monitor(found)
    pool.stop()
    return found


def make_images(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(0)
    for number in range(IMAGES):
        path = folder / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        pixels = noise.integers(0, 255, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((240, 240)).save(path)


def run(checkout: Path, folder: Path) -> dict[str, float]:
    """One measurement in a new process that imports this checkout."""
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", __file__, "--one", str(folder)]
    done = subprocess.run(
        command, env=env, cwd=checkout, check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("checkout") == str(checkout), "another gpupool was imported"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", type=Path, help="measure here, once, with images in this folder")
    args = parser.parse_args()
    if args.one:
        import gpupool

        found: dict[str, Any] = {**measure(args.one)}
        found["checkout"] = str(Path(gpupool.__file__).parents[1])
        print(json.dumps(found))
        return
    before, after = (path.resolve() for path in args.checkouts)
    rounds: dict[Path, list[dict[str, float]]] = {before: [], after: []}
    with tempfile.TemporaryDirectory() as temporary:
        make_images(Path(temporary))
        for number in range(args.rounds):
            for checkout in (before, after) if number % 2 == 0 else (after, before):
                rounds[checkout].append(run(checkout, Path(temporary)))
    print("| | before | after | ratio |\n|---|---|---|---|")
    for name in rounds[before][0]:
        old, new = (statistics.median(one[name] for one in rounds[at]) for at in (before, after))
        print(f"| {name} | {old:.3g} | {new:.3g} | {new / old:.2f} |")


if __name__ == "__main__":
    main()
