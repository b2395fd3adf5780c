"""What a sample of a data set takes, and how it is best read therefore. Runs on engines; torch.

Samples that wait, for a disk or a network, and those that compute without Python's lock (the GIL),
are read by threads; those that hold it by processes. Time on the queue for a core counts as
neither: it says what else this machine does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from gpupool.data.reading.augmentation import keyed_draws
from gpupool.data.reading.collate import PendingBatch
from gpupool.data.reading.pipeline import Reading, work_alone
from gpupool.data.reading.samples import NUM_FETCH_THREADS
from gpupool.data.stores.threads import start_threads

_PAYS_S = 3.0  # of reading: to start processes takes about as much
_QUICK_S = 30e-6  # a sample: what handing it from thread to thread costs
_WAITS = 0.5  # the share of a sample's time on a core, below which it waits for something else
_OVERLAPS = 0.75  # the share of the cores that threads get, from which on they overlap
_LOOK_S, _MOST_LOOKED_AT = 0.25, 16  # how long, and at how many samples at most
_MOST_WAITING = 16  # processes that wait, where it must be processes
_MOST_TRIED = 4  # threads that are tried at once


@dataclass(frozen=True, slots=True)
class Measured:
    """What a sample takes: `wall_s` without waiting for a core, and `cpu_s` on one.

    `overlap` is how much of the cores several threads get: 1 is all of them, and with one of two
    threads holding the GIL it is a half.
    """

    wall_s: float
    cpu_s: float
    overlap: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether most of it is waiting: for a disk, a network, a sleep."""
        return self.cpu_s < _WAITS * self.wall_s

    def num_waiting(self, cores: int, most: int) -> int:
        """How many at once keep the cores busy."""
        return max(2, min(most, math.ceil(cores * self.wall_s / max(self.cpu_s, 1e-9))))


@dataclass(frozen=True, slots=True)
class Way:
    """`num` "threads" or "processes"; or "here", in the thread that asks for the batches."""

    kind: str
    num: int = 1

    def __str__(self) -> str:
        if self.kind == "here":
            return "the training's own thread"
        return (
            f"1 {self.kind.removesuffix('s').removesuffix('e')}"
            if self.num == 1
            else (f"{self.num} {self.kind}")
        )


def choose(
    workers: int | None,
    cores: int,
    measured: Measured,
    num_samples: int,
    *,
    draws: bool,
    can_travel: bool,
) -> Way:
    """How to read `num_samples` samples. Where the user has chosen a number, it is that one."""
    one = Way("here" if draws else "threads")
    if workers == 0:
        return one
    overlaps = measured.overlap >= _OVERLAPS and measured.wall_s >= _QUICK_S
    by_threads = not draws and (measured.waits or overlaps)
    if workers is not None:
        if can_travel and not by_threads:
            return Way("processes", workers)
        return one if draws else Way("threads", workers)
    if by_threads:
        waiting = measured.num_waiting(cores, NUM_FETCH_THREADS)
        return Way("threads", waiting if measured.waits else cores)
    pays = measured.wall_s * num_samples >= _PAYS_S and measured.wall_s >= _QUICK_S
    # On one core a process would only take it from the training, unless it waits.
    if not pays or not can_travel or (cores == 1 and not measured.waits):
        return one
    waiting = measured.num_waiting(cores, _MOST_WAITING) if measured.waits else 0
    return Way("processes", max(cores, waiting))


class Clock:
    """What this thread does from now on."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.thread_time(), _queued_s()

    def measured(self, num_samples: int) -> Measured:
        """A sample, of so many."""
        wall, cpu, queued = (
            now - began
            for now, began in zip(
                (time.perf_counter(), time.thread_time(), _queued_s()), self._began, strict=True
            )
        )
        return Measured(max(wall - queued, cpu) / num_samples, cpu / num_samples)


def _queued_s() -> float:
    """How long this thread has waited for a core, which is not waiting for its data."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # a kernel without it
        return 0.0


def look_at(dataset: Any, pending: PendingBatch, reading: Reading) -> Measured:
    """Read the rows of a batch, and see how that goes."""
    rows, num = iter(range(len(pending.indices))), len(pending.indices)

    def read_rows(is_enough: Callable[[int], bool]) -> int:
        done = 0
        for row in rows:
            if pending.has_failed:
                break
            try:
                index = pending.indices[row]
                with keyed_draws(reading.draw, index):
                    sample = dataset[index]
                pending.put(row, sample)
            except BaseException as error:  # raised again when the batch is asked for
                pending.fault(row, error)
            done += 1
            if is_enough(done):
                break
        return done

    # The first sample may import modules and open files.
    clock = Clock()
    read_rows(lambda done: True)
    measured = clock.measured(1)
    if num > 1:
        clock, until = Clock(), time.perf_counter() + _LOOK_S
        seen = read_rows(
            lambda done: done >= min(_MOST_LOOKED_AT, num // 2) or time.perf_counter() > until
        )
        measured = clock.measured(max(1, seen))
    cores = torch.get_num_threads()
    num_threads = min(NUM_FETCH_THREADS, num) if measured.waits else min(cores, _MOST_TRIED)
    if num_threads < 2 or measured.wall_s < _QUICK_S or reading.workers == 0:
        read_rows(lambda done: False)
        return measured
    took: SimpleQueue[float] = SimpleQueue()

    def work() -> None:
        before = time.thread_time()
        try:
            work_alone(reading.device)
            read_rows(lambda done: False)
        finally:
            took.put(time.thread_time() - before)

    began = time.perf_counter()
    start_threads("gpupool-loader", [work] * num_threads)
    cpu_s = sum(took.get() for _ in range(num_threads))
    torch.set_num_threads(cores)  # what a thread sets is the default of later ones
    overlap = cpu_s / max(1e-9, time.perf_counter() - began) / num_threads
    return replace(measured, overlap=overlap)
