"""How a data set is read: by threads, by workers, or where the training runs. On engines; torch.

Data sets of ours are read by threads. Of others the first batch is read here, and measured: does a
sample wait or compute, and is it worth to fork?
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch

from gpupool.core.machine.limits import little_shared_memory
from gpupool.data import device as devices
from gpupool.data.reading.augmentation import generators, restore
from gpupool.data.reading.batches import Batch, Collate, Reading, Rows, is_table, made
from gpupool.data.reading.inputs import opened
from gpupool.data.reading.processes import Workers, unread
from gpupool.data.reading.samples import Draw, Samples
from gpupool.data.reading.shards import Indices
from gpupool.data.reading.threads import Reads, read_ahead, read_in_threads
from gpupool.data.reading.trees import tensors

_QUICK_BYTES = 1 << 18  # of a batch that lies in memory: about 0.03 ms
_PAYS_S = 3.0  # of reading, for which workers are forked
_WAITS = 0.5  # the share of a sample's time on a core, below which it waits for something else
_MOST_WAITING = 8  # workers a core


def load_batches(
    dataset: Any,
    batches: Sequence[Indices],
    *,
    device: torch.device | str = "cpu",
    draw: Draw | None = None,
    skip: bool = False,
    collate: Collate | None = None,
    workers: int | None = None,
) -> Reads:
    """For each entry of `batches`, none of which is empty, in order, its samples as a `Batch`.

    They are read ahead, from the first `next()` on; by `workers` processes what is no data set of
    ours (`Samples`, or a Subset of one). Tensors stay in CPU memory, pinned if `device` is a CUDA
    device. For the others see `Reading`.

    What reading raises is raised by the `next()` of that batch. Closing the iterator, also by an
    exception or by leaving the last reference, ends the threads; those that wait for a store end
    when it answers.
    """
    reading = Reading(draw, skip, collate, devices.of(device).device)
    if is_table(dataset) and collate is None:
        num_bytes = sum(tensor.nbytes for tensor in dataset.tensors) // max(1, len(dataset))
        reads = _here(Rows(dataset), batches, reading)
        is_quick = num_bytes * max(map(len, batches), default=0) <= _QUICK_BYTES
        return reads if is_quick else read_ahead(reads, reading)
    return _read(dataset, batches, reading, workers)


class _Known:
    """What is known of a data set, and the workers that read it."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset, self.collate = dataset, collate
        whole = opened(dataset)
        self.rows, self._unread = Rows(whole), unread(whole)
        self.by_threads = isinstance(whole, Samples)
        self.num_workers: int | None = None
        self._workers: list[Workers] = []
        self._idle: list[Workers] = []

    def by_workers(self, batches: Sequence[Indices], reading: Reading) -> Reads:
        """Batches that workers read, which are the next one's afterwards."""
        if not self._idle:
            self._workers.append(Workers(self._unread, self.num_workers or 1, self.collate))
            self._idle.append(self._workers[-1])
        workers = self._idle.pop()
        try:
            yield from workers.read(batches, reading)
        finally:
            self._idle.append(workers)

    def close(self) -> None:
        for workers in self._workers:
            workers.close()


_kept: list[_Known] | None = None
_passes = 1


@contextmanager
def kept(passes: int = 1) -> Iterator[None]:
    """What is found out about data sets, and workers that read them, stay until the end.

    Each is read about `passes` times. Inside of another `kept`, the outer one counts.
    """
    global _kept, _passes
    if _kept is not None:
        yield
        return
    mine: list[_Known] = []
    _kept, _passes = mine, passes
    try:
        yield
    finally:
        _kept, _passes = None, 1
        for known in mine:
            known.close()


def read_by(dataset: Any) -> str:
    """By what a data set is read, while it is `kept`: "8 workers"; "" where that is not known."""
    found = [one for one in _kept or () if one.dataset is dataset and not one.by_threads]
    if not found or (num := found[0].num_workers) is None:
        return ""
    return f"{num} worker{'s' * (num > 1)}" if num else "the training's own thread"


def _read(
    dataset: Any, batches: Sequence[Indices], reading: Reading, num_workers: int | None
) -> Reads:
    mine, passes = [] if _kept is None else _kept, _passes
    same = (one for one in mine if one.dataset is dataset and one.collate is reading.collate)
    known = next(same, None)
    if known is None:
        known = _Known(dataset, reading.collate)
        mine.append(known)
    try:
        if known.by_threads:
            num_read = 0
            with closing(read_in_threads(known.rows.dataset, batches, reading)) as reads:
                for read in reads:
                    num_read += 1
                    yield read
                    del read  # it is the caller's now
            batches = batches[num_read:]
            known.by_threads = not len(batches)  # else they draw what threads share
        if known.num_workers is None:
            known.num_workers = num_workers
        if known.num_workers is None and len(batches):
            num_samples = passes * sum(map(len, batches))
            first, *batches = batches
            batch, known.num_workers = _first(known.rows, first, reading, num_samples)
            yield batch
            del batch  # it is the caller's now
        if known.num_workers and len(batches):
            yield from read_ahead(known.by_workers(batches, reading), reading)
        else:
            yield from _here(known.rows, batches, reading)
    finally:
        if mine is not _kept:
            known.close()


def _here(rows: Rows, batches: Sequence[Indices], reading: Reading) -> Reads:
    for indices in batches:
        yield rows.batch(indices, reading)


def _first(rows: Rows, indices: Indices, reading: Reading, num_samples: int) -> tuple[Batch, int]:
    """The first batch, and how many workers shall read the `num_samples` of all."""
    num_first = min(1, len(indices) - 1)  # it may import modules, and open files
    before = generators()
    try:
        samples = rows.samples(indices[:num_first], reading)
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        samples += rows.samples(indices[num_first:], reading)
        batch = made(samples, indices, reading)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
    finally:
        if reading.draw is not None:
            restore(before)
    if any(tensor.is_cuda for tensor in tensors(batch)):
        return batch, 0  # a forked process cannot use a GPU
    num_cores = torch.get_num_threads()
    num_timed = len(indices) - num_first
    num = num_workers_for(wall_s / num_timed, cpu_s / num_timed, num_samples, num_cores)
    if num and (said := little_shared_memory()):
        warnings.warn(f"{said} Until then no workers read the data.", stacklevel=2)
        num = 0
    return batch, num


def num_workers_for(wall_s: float, cpu_s: float, num_samples: int, cores: int) -> int:
    """How many workers shall read samples that take so long each, of which `cpu_s` on a core."""
    if wall_s * num_samples < _PAYS_S:
        return 0
    if cpu_s >= _WAITS * wall_s:
        return cores
    return min(_MOST_WAITING * cores, math.ceil(cores * wall_s / max(cpu_s, 1e-9)))
