"""Reads samples with many threads, decodes with a few, delivers in order. Runs on engines.

    tickets ──> fetch threads ──> fetched ──> decode threads ──> batches, each ready on its own

Which samples are under way is decided in the thread that asks for batches, a batch at a time: the
window. Two things bound memory besides: the bytes that are fetched and not yet decoded, and, where
batches are small and many of them are needed to keep the fetch threads busy, the decoded rows.

That thread may be interrupted anywhere, in the middle of Python's own locks too. So it takes none
that others need: it puts into queues and gets from them, which are written in C, and one None that
the threads hand on ends them all. They are daemons: a store that never answers keeps no process
alive.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from gpupool.data import device as devices
from gpupool.data.reading.augmentation import DrawsError, keyed_draws
from gpupool.data.reading.collate import Batch, Collate, PendingBatch
from gpupool.data.reading.samples import NUM_FETCH_THREADS, Draw, Samples
from gpupool.data.reading.shards import Indices
from gpupool.data.stores.retry import try_until
from gpupool.data.stores.threads import join_threads, start_threads

MAX_BYTES_IN_FLIGHT = 256 << 20
THREAD_NAME = "gpupool-loader"
MIN_ROWS_AHEAD = 2 * NUM_FETCH_THREADS  # so that they need not wait for the next batch
_POLL_S = 0.5  # of a thread that waits for memory: whether the reading has ended meanwhile


@dataclass(frozen=True, slots=True)
class Reading:
    """How batches are read.

    `draw` keys the random numbers of augmentation; `skip` leaves out samples that cannot be read.
    `depth` batches are read ahead. `max_bytes` bounds what is fetched but not yet decoded, though
    one sample may always be under way. `collate` is the user's function that makes a batch;
    `workers` as in `TrainingOptions`.
    """

    depth: int = 2
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    draw: Draw | None = None
    skip: bool = False
    max_bytes: int = MAX_BYTES_IN_FLIGHT
    collate: Collate | None = None
    workers: int | None = None

    @property
    def pin(self) -> bool:
        """Whether batches are made in memory that a GPU can copy from while it computes."""
        return self.device.type == "cuda"

    def collate_of(self, indices: Indices) -> Collate | None:
        """`collate` for the batch of these samples; what it draws, the first of them keys."""
        collate = self.collate
        if collate is None or self.draw is None or not len(indices):
            return collate
        draw, key = self.draw, -1 - int(indices[0])  # no sample's own

        def keyed(samples: list[Any]) -> Any:
            with keyed_draws(draw, key):
                return collate(samples)

        return keyed

    def pending(self, indices: Indices) -> PendingBatch:
        """A batch of these samples, all of them still to come."""
        return PendingBatch(indices, pin=self.pin, skip=self.skip, collate=self.collate_of(indices))


def read_in_threads(
    dataset: Samples,
    batches: Sequence[Indices],
    reading: Reading,
    num_fetchers: int = NUM_FETCH_THREADS,
    given: list[Batch | None] | None = None,
) -> Generator[Batch | None, None, None]:
    """The samples of each entry of `batches`, in order, after those `given`; None if it is empty.

    The threads start with the first `next()`, and end with the iterator, however that ends.
    """
    given = given or []
    stage = _Stage(dataset, reading)
    owner = Owner()
    weakref.finalize(owner, stage.close)  # should an interrupt hit the `finally` below
    window = _Window(batches, reading, stage)
    try:
        threads = _start(stage, sum(map(len, batches)), num_fetchers)
        window.fill()
        while given:
            yield given.pop(0)  # it is the caller's then
        while (pending := window.next()) is not None:
            if not pending.indices:
                yield None
                continue
            batch = result_of(pending)
            window.fill()
            yield batch
            del batch  # it is the caller's now
        stage.close()
        join_threads(threads)
    except DrawsError:  # what is read again must not meet what they still draw
        stage.close()
        join_threads(threads, threading.TIMEOUT_MAX)
        raise
    finally:
        stage.close()


class _Ticket(NamedTuple):
    """One sample to read, and where it goes."""

    batch: PendingBatch
    row: int


class _Fetched(NamedTuple):
    """One sample to decode."""

    ticket: _Ticket
    content: Any
    num_bytes: int


class _Stage:
    """What the threads of one reading share."""

    def __init__(self, dataset: Samples, reading: Reading) -> None:
        self.dataset, self.reading = dataset, reading
        self.tickets: SimpleQueue[_Ticket | None] = SimpleQueue()
        self.fetched: SimpleQueue[_Fetched | None] = SimpleQueue()
        self.started: SimpleQueue[BaseException | None] = SimpleQueue()
        self.is_closed = False
        self.row_bytes = 0
        self._bytes_in_flight = 0
        self._memory = threading.Condition()  # the asking thread never takes it

    def close(self) -> None:
        """End the threads: those that wait for work at once, others when they come back."""
        self.is_closed = True
        self.tickets.put(None)
        self.fetched.put(None)

    def fetch(self) -> None:
        """What a fetch thread does."""
        try_until(lambda: self.is_closed)
        torch.set_num_threads(1)  # a data set that is not ours may compute here, too
        while (ticket := self.tickets.get()) is not None and not self.is_closed:
            self._fetch_one(ticket)
            del ticket
        self.tickets.put(None)

    def decode(self) -> None:
        """What a decode thread does."""
        try:
            work_alone(self.reading.device)
            self.started.put(None)
        except BaseException as error:  # raised again in the thread that asks
            self.started.put(error)
        while (fetched := self.fetched.get()) is not None and not self.is_closed:
            self._decode_one(fetched)
            del fetched
        self.fetched.put(None)

    def _fetch_one(self, ticket: _Ticket) -> None:
        batch, row = ticket
        index = batch.indices[row]
        if batch.has_failed:
            return
        taken = 0
        try:
            num_bytes = self.dataset.num_bytes(index)
            self._take(num_bytes)
            taken = num_bytes
            if not self.is_closed:
                self.fetched.put(_Fetched(ticket, self.dataset.fetch(index), num_bytes))
        except BaseException as error:  # raised again in the thread that asks
            self._give_back(taken)
            batch.fault(row, error)

    def _decode_one(self, fetched: _Fetched) -> None:
        (batch, row), content, num_bytes = fetched
        try:
            if not batch.has_failed:
                sample = self.dataset.decode(batch.indices[row], content, self.reading.draw)
                batch.put(row, sample)
                self.row_bytes = max(self.row_bytes, batch.row_bytes)
        except BaseException as error:  # as above
            batch.fault(row, error)
        finally:
            self._give_back(num_bytes)

    def _take(self, num_bytes: int) -> None:
        """Wait until there is memory for so many bytes, or nothing else is in flight."""
        with self._memory:
            while (
                self._bytes_in_flight
                and self._bytes_in_flight + num_bytes > self.reading.max_bytes
                and not self.is_closed
            ):
                self._memory.wait(_POLL_S)
            self._bytes_in_flight += num_bytes

    def _give_back(self, num_bytes: int) -> None:
        with self._memory:
            self._bytes_in_flight -= num_bytes
            self._memory.notify_all()


class _Window:
    """The batches under way, in order. Belongs to the thread that asks for them."""

    def __init__(self, batches: Sequence[Indices], reading: Reading, stage: _Stage) -> None:
        self._remaining: Iterator[Indices] = iter(batches)
        self._reading, self._stage = reading, stage
        self._ahead: deque[PendingBatch] = deque()
        self._is_all = False

    def next(self) -> PendingBatch | None:
        """The batch that is due; None after the last."""
        self.fill()
        return self._ahead.popleft() if self._ahead else None

    def fill(self) -> None:
        """Have as much under way as is allowed."""
        while not self._is_all and self._has_room():
            indices = next(self._remaining, None)
            if indices is None:
                self._is_all = True
                return
            batch = self._reading.pending(indices)
            self._ahead.append(batch)
            for row in range(len(batch.indices)):
                self._stage.tickets.put(_Ticket(batch, row))

    def _has_room(self) -> bool:
        if len(self._ahead) < self._reading.depth:
            return True
        rows, row_bytes = sum(len(batch.indices) for batch in self._ahead), self._stage.row_bytes
        return 0 < rows * row_bytes < self._reading.max_bytes and rows < MIN_ROWS_AHEAD


def work_alone(device: torch.device) -> None:
    """Have this thread compute without helper threads, for `device`.

    As torch's own loader does: each image is worked on by one thread, there are more.
    """
    devices.of(device).make_current()  # pinning would open a context on GPU 0
    torch.get_num_threads()  # the first use in a thread takes over the default
    torch.set_num_threads(1)


class Owner:
    """Gone when the iterator is."""


def _start(stage: _Stage, num_samples: int, num_fetchers: int) -> list[threading.Thread]:
    num_cores = torch.get_num_threads()
    num_decoders = min(num_cores, num_samples)
    num_fetchers = min(num_fetchers, num_samples)
    works = [stage.fetch] * num_fetchers + [stage.decode] * num_decoders
    threads = start_threads(THREAD_NAME, works)
    for _ in range(num_decoders):
        error = stage.started.get()
        if error is not None:
            raise error
    # What a thread sets for itself is also the default of threads that are yet to come.
    torch.set_num_threads(num_cores)
    return threads


def result_of(pending: PendingBatch) -> Batch:
    """The batch, when its last row is there; raises the first error of one."""
    result = pending.done.get()
    if isinstance(result, Batch):
        return result
    try:
        raise result
    finally:
        del result  # its traceback holds this frame
