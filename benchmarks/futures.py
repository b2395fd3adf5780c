"""Tasks on two ranks, beside LoadBalancedView, ProcessPoolExecutor and joblib; and a sweep.

    python benchmarks/futures.py [--rounds 5] [--tasks 1000] [--trials 24]

The view is that of ipyparallel's client on the engines of the same pool. The executor and joblib's
loky have two processes each. The ways take turns, and all have done something before they are
measured; medians are printed. Trust the ratios.

latency     of a function that does nothing, from the call to its result; 20 times in a round
tasks/s     of as many such functions as `--tasks`, all asked for at once
64 MiB      100 functions that get the same array of 64 MiB, four at a time
efficiency  of 200 functions that wait for 50 ms: 1 is twice as fast as one after the other

A sweep of small trainings that report is beside the same trainings in one cell, where each rank has
its share of them. `--trials 0` leaves it out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import numpy as np
from joblib import Parallel, delayed

import gpupool

RANKS, AT_ONCE = 2, 4
LATENCIES, ARRAYS, PAUSES, PAUSE_S, MIB = 20, 100, 200, 0.05, 64
# Calls a function with each of these arguments; no more than so many are asked for at once.
Way = Callable[[Callable[..., object], Sequence[tuple[Any, ...]], int], None]
# Those of the table, each with its format.
COLUMNS = {
    "latency, ms": "{:.2f}",
    "tasks/s": "{:.0f}",
    f"{MIB} MiB, {ARRAYS} times, s": "{:.2f}",
    "efficiency": "{:.3f}",
}


def nothing() -> None:
    """The shortest task."""


def pause(seconds: float) -> None:
    """A task of a known length."""
    import time

    time.sleep(seconds)


def first(array: Any) -> float:
    """A task that reads its argument."""
    return float(array[0])


def by_futures(submit: Callable[..., Future[Any]]) -> Way:
    """What gives futures."""

    def call(function: Callable[..., object], calls: Sequence[tuple[Any, ...]], most: int) -> None:
        waiting = deque[Future[Any]]()
        for arguments in calls:
            if len(waiting) == most:
                waiting.popleft().result()
            waiting.append(submit(function, *arguments))
        for future in waiting:
            future.result()

    return call


def by_joblib(parallel: Parallel) -> Way:
    """joblib, which asks for four at once by itself."""

    def call(function: Callable[..., object], calls: Sequence[tuple[Any, ...]], most: int) -> None:
        parallel(delayed(function)(*arguments) for arguments in calls)

    return call


@contextlib.contextmanager
def all_ways() -> Iterator[tuple[Any, dict[str, Way]]]:
    """The pool, and name -> way."""
    context = multiprocessing.get_context("forkserver")
    with (
        ProcessPoolExecutor(RANKS, mp_context=context) as executor,
        Parallel(n_jobs=RANKS) as parallel,
        gpupool.start(n=RANKS, device="cpu") as pool,
    ):
        ways = {
            "pool.submit": by_futures(pool.submit),
            "LoadBalancedView": by_futures(pool.client.load_balanced_view().apply_async),
            "ProcessPoolExecutor": by_futures(executor.submit),
            "joblib, loky": by_joblib(parallel),
        }
        for way in ways.values():
            way(pause, [(PAUSE_S,)] * 2 * RANKS, 2 * RANKS)
        yield pool, ways


def taken_s(act: Callable[[], object]) -> float:
    """What it takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def measure(way: Way, num_tasks: int, array: Any) -> list[float]:
    """All columns but the first."""
    burst_s = taken_s(lambda: way(nothing, [()] * num_tasks, num_tasks))
    arrays_s = taken_s(lambda: way(first, [(array,)] * ARRAYS, AT_ONCE))
    pauses_s = taken_s(lambda: way(pause, [(PAUSE_S,)] * PAUSES, PAUSES))
    return [num_tasks / burst_s, arrays_s, PAUSES * PAUSE_S / RANKS / pauses_s]


def tasks(ways: dict[str, Way], num_rounds: int, num_tasks: int) -> dict[str, list[float]]:
    """name -> medians, one for each column."""
    measured: dict[str, list[list[float]]] = {name: [] for name in ways}
    array = np.random.default_rng(0).random(MIB << 17)
    for number in range(num_rounds):
        names = list(ways) if number % 2 == 0 else list(reversed(ways))
        latencies: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(LATENCIES):
            for name in names:
                latencies[name].append(taken_s(lambda way=ways[name]: way(nothing, [()], 1)))
        for name in names:
            found = measure(ways[name], num_tasks, array)
            measured[name].append([1000 * statistics.median(latencies[name]), *found])
    return {
        name: [statistics.median(column) for column in zip(*rounds, strict=True)]
        for name, rounds in measured.items()
    }


def trained(number: int, report: Callable[..., object]) -> float:
    """A training of a tenth of a second that reports five times; returns its loss."""
    import torch

    torch.manual_seed(number)
    network = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    loss = torch.tensor(0.0)
    for step in range(500):
        inputs = torch.randn(64, 8)
        loss = (network(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            report(step, loss=loss.item())
    return loss.item()


def objective(params: dict[str, Any]) -> float:
    """Of the sweep."""
    return trained(params["number"], gpupool.report)


def train_share(numbers: Iterable[int], rank: int) -> None:
    """What a rank has of the same trainings, without a sweep."""
    for number in list(numbers)[rank::RANKS]:
        trained(number, lambda step, loss: None)


def sweeps(pool: Any, num_rounds: int, num_trials: int) -> tuple[float, float]:
    """Medians: seconds of the trainings alone, and of the sweep."""
    numbers = range(num_trials)

    def alone() -> None:
        running = [pool.submit(train_share, numbers, rank) for rank in range(RANKS)]
        for task in running:
            task.result()

    def swept() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            gpupool.sweep(objective, {"number": numbers}, trials=num_trials, sampler="grid")

    found = [(taken_s(alone), taken_s(swept)) for _ in range(num_rounds + 1)]
    alone_s, swept_s = zip(*found[1:], strict=True)  # the first imports what both need
    return statistics.median(alone_s), statistics.median(swept_s)


def main() -> None:
    """Measure and print, ready for RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--trials", type=int, default=24)
    chosen = parser.parse_args()
    with all_ways() as (pool, ways):
        found = tasks(ways, chosen.rounds, chosen.tasks)
        print(f"\n| way | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
        for name, row in found.items():
            cells = [text.format(one) for text, one in zip(COLUMNS.values(), row, strict=True)]
            print(f"| {name} | {' | '.join(cells)} |")
        if chosen.trials:
            alone_s, swept_s = sweeps(pool, chosen.rounds, chosen.trials)
            each_ms = 1000 * RANKS * (swept_s - alone_s) / chosen.trials
            print(f"\n| {chosen.trials} trainings alone, s | sweep, s | more a trial, ms |")
            print(f"|---|---|---|\n| {alone_s:.2f} | {swept_s:.2f} | {each_ms:.0f} |")


if __name__ == "__main__":
    main()
