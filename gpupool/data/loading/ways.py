"""How a data set is read: by threads or by processes, measured by its first samples. On engines.

    with kept(passes=10):                     # the epochs of a training: processes stay until then
        for batch in load_batches(dataset, batches): ...

The first batch is read here and measured: does a sample wait, do threads overlap, or does each hold
Python's lock (the GIL)? From the second on it goes the way that was chosen. A way may change in
between: batches that were read ahead are then read again, so that each is as it would have been.

Samples that draw from numpy's or Python's global generator cannot be read by threads, which share
it. That is noticed before a batch is given out; processes have generators of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import ConcatDataset
from torch.utils.data import Dataset as TorchDataset

from gpupool.data import device as devices
from gpupool.data.loading.measuring import Clock, Measured, Way, choose, look_at
from gpupool.data.loading.processes import Parcel, Processes
from gpupool.data.reading import subsets
from gpupool.data.reading.augmentation import DrawsError, Watch, keyed_draws
from gpupool.data.reading.collate import Batch, Collate
from gpupool.data.reading.cpu_loader import (
    Noticed,
    in_order,
    is_quick,
    may_draw,
    read,
    read_alone,
    read_here,
    reads_many,
)
from gpupool.data.reading.pipeline import (
    MAX_BYTES_IN_FLIGHT,
    Reading,
    read_in_threads,
    result_of,
    work_alone,
)
from gpupool.data.reading.samples import Draw, Samples
from gpupool.data.reading.shards import Indices

Make = Callable[[Any], Any]
Reads = Generator[Batch | None, None, None]

# ---- what is kept ---------------------------------------------------------------------------


class _Plan:
    """How one data set is read, and what is known of it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.noticed = Noticed()
        self.is_ours = isinstance(dataset, Samples)
        # An own one is looked at; of ours it is known, until its transform draws.
        self.measured = Measured(0.005, 0.005) if self.is_ours else None
        self.is_refused = False  # it cannot be sent, or no process can be started
        self.read_by = ""
        self._unread = None if self.is_ours else _as_it_is(dataset)
        self._parcel: Parcel | None = None

    def way(self, reading: Reading, num_samples: int) -> Way:
        """How to read so many samples, once they have been measured."""
        assert self.measured is not None
        cores = torch.get_num_threads()
        chosen = partial(
            choose,
            reading.workers,
            cores,
            self.measured,
            num_samples,
            draws=self.noticed.draws,
        )
        way = chosen(can_travel=not self.is_refused)
        if way.kind == "processes" and self._parcel is None:
            settings = {"collate": reading.collate}
            try:
                self._parcel = Parcel(self._unread or self.dataset, settings)
                self._parcel.packed()  # here, as each process will want it
            except Exception:  # whatever pickling runs into
                self.is_refused = True
                return chosen(can_travel=False)
        return way

    @property
    def parcel(self) -> Parcel:
        assert self._parcel is not None
        return self._parcel


class _Kept:
    """Plans and processes of the passes over data sets that belong together."""

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self._plans: dict[int, _Plan] = {}  # by id of data sets, which they hold
        self._made: dict[tuple[int, Make], tuple[Any, Any]] = {}  # of what, what
        self._processes: Processes | None = None

    def made(self, make: Make, dataset: Any) -> Any:
        key = id(dataset), make
        if key not in self._made:
            self._made[key] = dataset, make(dataset)
        return self._made[key][1]

    def plan_of(self, dataset: Any) -> _Plan:
        if id(dataset) not in self._plans:
            self._plans[id(dataset)] = _Plan(dataset)
        return self._plans[id(dataset)]

    def read_by(self, dataset: Any) -> str:
        made = [one for of, one in self._made.values() if of is dataset]
        plans = [self._plans.get(id(one)) for one in (*made, dataset)]
        return next((plan.read_by for plan in plans if plan is not None), "")

    def processes(self, num: int) -> Processes:
        if self._processes is None:
            self._processes = Processes(num)
        return self._processes

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()

    def reads(self, plan: _Plan, batches: Sequence[Indices], reading: Reading) -> Reads:
        """Batches, in order, by the way that is right now: not all, where that may change."""
        if plan.is_ours and not plan.noticed.draws:
            return _unmoved(read_in_threads(plan.dataset, batches, reading), plan, reading)
        read: list[Batch | None] = []
        if plan.measured is None:
            watch = Watch()
            try:
                read = _first(plan, batches, reading)
            except DrawsError:
                plan.noticed.draws = True
            if plan.noticed.draws or (reading.draw is not None and watch.has_moved()):
                watch.restore()
                plan.noticed.draws, read = True, []
        return self._chosen(plan, batches[len(read) :], reading, read)

    def _chosen(
        self,
        plan: _Plan,
        batches: Sequence[Indices],
        reading: Reading,
        read: list[Batch | None],
    ) -> Reads:
        """Batches after those that have been `read`, and these first."""
        if plan.measured is None:  # all are empty
            return _here(plan, batches, reading, read)
        num_samples = sum(map(len, batches)) * self.passes
        way = plan.way(reading, num_samples)
        if way.kind == "processes":
            processes = self.processes(way.num)
            if processes.is_ready:
                return self._by_processes(plan, processes, batches, reading, read)
            if not processes.has_failed:  # one reads until they are there
                way = Way("here" if plan.noticed.draws else "threads")
                return _by_way(
                    way,
                    plan,
                    batches,
                    reading,
                    read,
                    lambda: processes.is_ready or processes.has_failed,
                )
            plan.is_refused = True
            way = plan.way(reading, num_samples)
        return _by_way(way, plan, batches, reading, read)

    def _by_processes(
        self,
        plan: _Plan,
        processes: Processes,
        batches: Sequence[Indices],
        reading: Reading,
        read: list[Batch | None],
    ) -> Reads:
        plan.read_by = str(Way("processes", processes.num))
        parcel = plan.parcel

        def work(number: int) -> Batch | None:
            return processes.read(parcel, batches[number], reading)

        num = min(processes.num, len(batches))
        return in_order([work] * num, len(batches), reading, num + reading.depth, given=read)


_kept: _Kept | None = None


@contextmanager
def kept(passes: int = 1) -> Iterator[None]:
    """What is found out about data sets, and processes that read them, stay until the end.

    Each is read about `passes` times. Inside of another one, that counts.
    """
    global _kept
    if _kept is not None:
        yield
        return
    _kept = mine = _Kept(passes)
    try:
        yield
    finally:
        _kept = None
        mine.close()


def opened(dataset: Any) -> Any:
    """`subsets.opened`, the same object each time while it is `kept`."""
    make = subsets.opened
    return make(dataset) if _kept is None else _kept.made(make, dataset)


def again(dataset: Any) -> Any:
    """`subsets.again`, the same object each time while it is `kept`."""
    make = subsets.again
    return make(dataset) if _kept is None else _kept.made(make, dataset)


def read_by(dataset: Any) -> str:
    """By what a data set is read, while it is `kept`: "8 threads"; "" where that is not known."""
    return "" if _kept is None else _kept.read_by(dataset)


def load_batches(
    dataset: Any,
    batches: Sequence[Indices],
    *,
    depth: int = 2,
    device: torch.device | str = "cpu",
    draw: Draw | None = None,
    skip: bool = False,
    max_bytes: int = MAX_BYTES_IN_FLIGHT,
    collate: Collate | None = None,
    workers: int | None = None,
) -> Reads:
    """For each entry of `batches`, in order, its samples as a `Batch`; None if it is empty.

    A data set of ours (`Samples`) is fetched by many threads and decoded by as many as this process
    has cores (`torch.get_num_threads()`): `depth` batches ahead, and further where batches are too
    small to keep the threads busy. Another one is read by `workers` threads or processes. Reading
    starts with the first `next()`. With `depth` 0 the caller's thread reads each batch when it is
    asked for, which a debugger can follow.

    Tensors stay in CPU memory, pinned if `device` is a CUDA device. `draw` keys the random numbers
    of augmentation, see `keyed_draws`. `skip` leaves out samples that raise SampleError and lists
    them in the batch. `max_bytes` bounds what has been fetched and not yet decoded. `collate` makes
    a batch of a list of samples.

    What a thread raises is raised by the `next()` of that batch. Closing the iterator, also by an
    exception or by leaving the last reference, ends the threads; those that wait for a store end
    when it answers.

    Raises DataError if the images of a batch differ in size.
    """
    reading = Reading(depth, devices.of(device).device, draw, skip, max_bytes, collate, workers)
    if reading.depth == 0 or is_quick(dataset, batches, reading):
        return read_here(dataset, batches, reading)
    return _read(dataset, batches, reading)


def _read(dataset: Any, batches: Sequence[Indices], reading: Reading) -> Reads:
    with kept():
        kept_now = _kept
        assert kept_now is not None
        plan = kept_now.plan_of(dataset)
        num = 0
        while num < len(batches):
            with closing(kept_now.reads(plan, batches[num:], reading)) as reads:
                try:
                    for batch in reads:
                        num += 1
                        yield batch
                        del batch  # it is the caller's now
                except DrawsError:  # and what was read ahead is read again
                    plan.noticed.draws = True


# ---- ways -----------------------------------------------------------------------------------


def _by_way(
    way: Way,
    plan: _Plan,
    batches: Sequence[Indices],
    reading: Reading,
    given: list[Batch | None],
    until: Callable[[], bool] = lambda: False,
) -> Reads:
    """By threads of this process, or here. Begins no batch more when `until` is true."""
    plan.read_by = str(way)
    if way.kind == "here":
        return _here(plan, batches, reading, given, until)
    if way.num > 1 and not reads_many(plan.dataset):
        whole = _Whole(plan.dataset, reading.draw)
        return _unmoved(read_in_threads(whole, batches, reading, way.num, given), plan, reading)

    def work(number: int) -> Batch | None:
        if way.num > 1:
            work_alone(reading.device)
        return read(plan.dataset, batches[number], reading)

    num_ahead = reading.depth if way.num == 1 else way.num + reading.depth
    reads = in_order([work] * way.num, len(batches), reading, num_ahead, given=given, until=until)
    return _unmoved(reads, plan, reading)


def _here(
    plan: _Plan,
    batches: Sequence[Indices],
    reading: Reading,
    given: list[Batch | None],
    until: Callable[[], bool] = lambda: False,
) -> Reads:
    while given:
        yield given.pop(0)
    for indices in batches:
        if until():
            return
        yield read_alone(plan.dataset, indices, reading, plan.noticed)


def _unmoved(reads: Reads, plan: _Plan, reading: Reading) -> Reads:
    """The same batches, as long as nothing has drawn from generators that threads share.

    Raises DrawsError then. It may have been the training itself: who it was, nobody knows.
    """
    may = reading.draw is not None and may_draw(plan.dataset, reading)
    watch = Watch() if may else None
    with closing(reads):
        for batch in reads:
            if watch is not None and watch.has_moved():
                reads.throw(DrawsError())  # which ends its threads, and comes back
            yield batch
            del batch


@dataclass(frozen=True)
class _Whole:
    """Any map-style data set as `Samples`, each in one part."""

    dataset: Any
    draw: Draw | None

    def __len__(self) -> int:
        return len(self.dataset)

    def num_bytes(self, index: int) -> int:
        """Not known before it is there; the batches that are under way bound it."""
        return 0

    def fetch(self, index: int) -> Any:
        """The sample."""
        with keyed_draws(self.draw, index):
            return self.dataset[index]

    def decode(self, index: int, fetched: Any, draw: Draw | None) -> Any:
        """The sample."""
        return fetched


# ---- measuring ------------------------------------------------------------------------------


def _first(plan: _Plan, batches: Sequence[Indices], reading: Reading) -> list[Batch | None]:
    """The batches up to the first that is not empty, whose samples are measured."""
    found: list[Batch | None] = []
    for indices in batches:
        if len(indices) == 0:
            found.append(None)
            continue
        # What a function that makes batches takes is part of it.
        if reads_many(plan.dataset) or reading.collate is not None:
            clock = Clock()
            try:
                batch = read(plan.dataset, indices, reading)
            finally:
                plan.measured = clock.measured(len(indices))
        else:
            pending = reading.pending(indices)
            plan.measured = look_at(plan.dataset, pending, reading)
            batch = result_of(pending)
        return [*found, batch]
    return found


def _as_it_is(dataset: Any) -> Any:
    """A data set as it is now, before reading opens files that could not travel.

    What it holds is not copied, but for data sets inside of it.
    """
    if not isinstance(dataset, TorchDataset):
        return dataset
    try:
        same = copy.copy(dataset)
        if isinstance(dataset, ConcatDataset):
            same.datasets = [_as_it_is(part) for part in dataset.datasets]  # type: ignore[attr-defined]
        for name, part in vars(dataset).items():
            if isinstance(part, TorchDataset):
                setattr(same, name, _as_it_is(part))
    except Exception:  # a class that is not to be copied
        return dataset
    return same
