"""What training costs besides the model: hand-written DDP, the peers and gpupool, in one run.

    python -m benchmarks.train [--rounds 6] [--cases micro tiny resnet18] [--ranks 2]

The same model, data and optimizer every way: under torchrun (all ways in the same ranks) and by
`train()` on a pool. Ways take turns, in an order that moves on each round, so that whatever else
the machine does falls on all. The model itself notes when each step begins, and the CPU time of
rank 0 with all its threads. CPU a step is the measure that others disturb least, then p10 of the
steps' wall time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from benchmarks import train_clock
from benchmarks.train_clock import CASES, Case, Times
from benchmarks.train_ways import WAYS, our_options
from gpupool import Pool, PoolOptions, TrainingRun

RAW, POOL = "raw DDP", "gpupool, train() on a pool"
HEAVY = [RAW, "raw DDP, again (noise)", "gpupool, fit() under torchrun"]  # of resnet18


@dataclass
class Row:
    """What one way took, by round: mean CPU of a step, wall of all steps, s to the first step."""

    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    mean_wall_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)

    def add(self, case: Case, times: Times, began: float) -> None:
        each, cpu_s = case.numbers(times)
        self.cpu_s.append(cpu_s)
        self.wall_s += each
        self.mean_wall_s.append(sum(each) / len(each))
        self.first_s.append(times.first_at - began)


class Ranks:
    """Ranks under torchrun that train in the ways that are asked for."""

    def __init__(self, asked: TextIO, answers: TextIO) -> None:
        self._asked, self._answers = asked, answers

    def train(self, case: Case, way: str) -> tuple[Times, float]:
        self._asked.write(f"{case.name} {way}\n")
        self._asked.flush()
        answer = json.loads(self._answers.readline())
        began = answer.pop("began")
        return Times(**answer), began


@contextlib.contextmanager
def torchrun(num_ranks: int) -> Iterator[Ranks]:
    with tempfile.TemporaryDirectory(prefix="gpupool-bench-") as folder:
        paths = [str(Path(folder, name)) for name in ("asked", "answers")]
        for path in paths:
            os.mkfifo(path)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num_ranks}", "-m", "benchmarks.train_ways", *paths]
        process = subprocess.Popen(command)
        with open(paths[0], "w") as asked, open(paths[1]) as answers:
            yield Ranks(asked, answers)
        process.wait()


def on_pool(pool: Pool, case: Case, data: object) -> tuple[Times, float]:
    model, options = case.model(), our_options(case, pool.world_size)
    began = time.time()
    TrainingRun(pool, model, data, "cross_entropy", options, None).result()  # type: ignore[arg-type]
    return pool.run(train_clock.take_last)[0], began


def measure(case: Case, ranks: Ranks, pool: Pool, rounds: int) -> dict[str, Row]:
    ways = [*(HEAVY if case.name == "resnet18" else WAYS), POOL]
    rows = {way: Row() for way in ways}
    data = case.data(pool.world_size)
    for number in range(rounds + 1):
        turn = number % len(ways)
        for way in ways[turn:] + ways[:turn]:
            took = on_pool(pool, case, data) if way == POOL else ranks.train(case, way)
            if number:  # the first round warms everything
                rows[way].add(case, *took)
    return rows


def report(case: Case, rows: dict[str, Row], num_ranks: int) -> None:
    base = rows[RAW]
    print(f"\n## {case.name}: {case.batch} samples a rank, {num_ranks} ranks, "
          f"{len(base.cpu_s)} rounds of {case.steps} steps\n")  # fmt: skip
    print("| way | CPU ms a step | over raw | wall p10 ms | over raw | samples/s | first step, s |")
    print("|---|---|---|---|---|---|---|")
    for way, row in rows.items():
        cpu = 1000 * statistics.median(row.cpu_s)
        over = [a - b for a, b in zip(row.cpu_s, base.cpu_s, strict=True)]
        p10, base_p10 = (1000 * quantile(r.wall_s, 0.1) for r in (row, base))
        rate = case.batch * num_ranks / statistics.median(row.wall_s)
        print(
            f"| {way} | {cpu:.2f} | {1000 * statistics.median(over):+.2f} | {p10:.2f} | "
            f"{p10 - base_p10:+.2f} | {rate:.0f} | {statistics.median(row.first_s):.2f} |",
            flush=True,
        )


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description="What training costs besides the model.")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ranks", type=int, default=2)
    chosen = parser.parse_args()
    began = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"
    with Pool(PoolOptions(n=chosen.ranks, device="cpu")) as pool, torchrun(chosen.ranks) as ranks:
        for name in chosen.cases:
            rows = measure(CASES[name], ranks, pool, chosen.rounds)
            report(CASES[name], rows, chosen.ranks)
    print(f"\nTook {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
