"""Reads ahead by threads. Runs on engines.

    64 threads fetch ──> as many decode as there are cores; the last of a batch makes it ──> next()

The thread that asks for batches may be interrupted anywhere, in the middle of Python's own locks
too. So it takes none that others need: it puts into queues and gets from them, which are written in
C, and one None that the threads hand on ends them all. They are daemons: a store that never answers
keeps no process alive.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch

from gpupool.core.errors import SampleError
from gpupool.data import device as devices
from gpupool.data.reading.augmentation import generators, keyed_draws, restore
from gpupool.data.reading.batches import Batch, Reading, made
from gpupool.data.reading.samples import NUM_FETCH_THREADS, Samples, Skipped, numbered
from gpupool.data.reading.shards import Indices
from gpupool.data.reading.trees import tensors
from gpupool.data.stores.retry import try_until
from gpupool.data.stores.threads import start_threads

T = TypeVar("T")
Reads = Generator[Batch | None, None, None]
THREAD_NAME = "gpupool-loader"
_MIN_ROWS = 3 * NUM_FETCH_THREADS  # under way, so that no thread waits for the next batch
_MAX_BYTES = 256 << 20  # of these, beyond the batches that are read ahead in any case


class _Raised(NamedTuple):
    error: BaseException


class _Owner:
    """Gone when the iterator is."""


# ---- one thread, for any generator ---------------------------------------------------------------


def read_ahead(reads: Generator[T, None, None], reading: Reading) -> Generator[T, None, None]:
    """That of `reads`: a thread runs it, `depth` ahead, and closes it."""
    wanted: SimpleQueue[bool] = SimpleQueue()
    answers: SimpleQueue[T | _Raised] = SimpleQueue()

    def run() -> None:
        with closing(reads):
            try:
                devices.of(reading.device).make_current()  # pinning would open a context on GPU 0
                while wanted.get():
                    answers.put(next(reads))
            except BaseException as error:  # raised again in the thread that asks
                answers.put(_Raised(error))

    owner = _Owner()
    weakref.finalize(owner, wanted.put, False)  # should an interrupt hit the `finally` below
    try:
        start_threads(THREAD_NAME, run)
        for _ in range(reading.depth):
            wanted.put(True)
        while True:
            value = _got(answers)
            wanted.put(True)
            yield value
            del value  # it is the caller's now
    except StopIteration:
        return
    finally:
        # Not waiting: a stop by the user must not hang on a store that does not answer.
        wanted.put(False)


def _got(answers: SimpleQueue[T | _Raised]) -> T:
    answer = answers.get()
    if not isinstance(answer, _Raised):
        return answer
    try:
        raise answer.error
    finally:
        del answer  # its traceback holds this frame


# ---- many threads, for data sets of ours -----------------------------------------------------


def read_in_threads(dataset: Samples, batches: Sequence[Indices], reading: Reading) -> Reads:
    """The samples of each entry of `batches`, in order; None if it is empty.

    The threads start with the first `next()`, and end with the iterator, however that ends. That
    ends before the first batch with a sample if samples draw from generators that threads share.
    """
    threads = _Threads(dataset, reading)
    left, under_way = deque(batches), deque[_Batch]()
    row_bytes, before = 0, generators()

    def read_more() -> None:
        while left:
            rows = sum(len(batch.samples) for batch in under_way)
            is_small = rows < _MIN_ROWS and 0 < rows * row_bytes < _MAX_BYTES
            if len(under_way) >= reading.depth and not is_small:
                return
            under_way.append(threads.read(left.popleft()))

    owner = _Owner()
    weakref.finalize(owner, threads.close)  # should an interrupt hit the `finally` below
    try:
        threads.start(sum(map(len, batches)))
        read_more()
        while under_way:
            batch = _got(under_way.popleft().done)
            if threads.has_drawn and not row_bytes:
                threads.close()
                for thread in threads.running:  # what is read again must not meet what they draw
                    thread.join()
                restore(before)
                return
            if batch is not None and batch.num:
                nbytes = sum(one.nbytes for one in tensors((batch.inputs, batch.targets)))
                row_bytes = max(1, nbytes // batch.num)
                threads.watches = False
            read_more()
            yield batch
            del batch  # it is the caller's now
    finally:
        threads.close()  # not waiting, as above


class _Batch:
    """A batch under way, whose last sample makes it."""

    def __init__(self, indices: Indices) -> None:
        self.indices = indices
        self.samples: list[Any] = [None] * len(indices)
        self.left = iter(range(len(indices) - 1, -1, -1))  # two threads never get the same of it
        self.done: SimpleQueue[Batch | _Raised | None] = SimpleQueue()


_Place = tuple[_Batch, int]  # a sample of a batch


class _Threads:
    """What the threads of one reading share."""

    def __init__(self, dataset: Samples, reading: Reading) -> None:
        self._dataset, self._reading = dataset, reading
        self._length = len(dataset)
        self._asked: SimpleQueue[_Place | None] = SimpleQueue()
        self._fetched: SimpleQueue[tuple[_Place, Any] | None] = SimpleQueue()
        self._started: SimpleQueue[None] = SimpleQueue()
        self.running: list[threading.Thread] = []
        self._is_closed = False
        self.watches = reading.draw is not None  # until the first batch is there
        self.has_drawn = False  # a sample, from what threads share

    def start(self, num_samples: int) -> None:
        """Start them: many fetch, as many decode as there are cores."""
        num_cores = torch.get_num_threads()
        num_fetching = min(NUM_FETCH_THREADS, num_samples)
        self.running = start_threads(THREAD_NAME, self._fetch, num_fetching)
        self.running += start_threads(THREAD_NAME, self._decode, num_cores)
        for _ in range(num_cores):
            self._started.get()
        # What a thread sets for itself is also the default of threads that are yet to come.
        torch.set_num_threads(num_cores)

    def read(self, indices: Indices) -> _Batch:
        """Begin to read a batch."""
        batch = _Batch(indices)
        for number in range(len(indices)):
            self._asked.put((batch, number))
        if not len(indices):
            batch.done.put(None)
        return batch

    def close(self) -> None:
        """End them: those that wait for work at once, others when they come back."""
        self._is_closed = True
        self._asked.put(None)
        self._fetched.put(None)

    def _fetch(self) -> None:
        try_until(lambda: self._is_closed)
        while (asked := self._asked.get()) is not None and not self._is_closed:
            batch, number = asked
            try:
                row = int(batch.indices[number]) % self._length
                self._fetched.put((asked, self._dataset.fetch(row)))
            except BaseException as error:  # raised again in the thread that asks
                self._fetched.put((asked, _Raised(error)))
            del asked, batch
        self._asked.put(None)

    def _decode(self) -> None:
        # Each image is worked on by one thread, as there are more of them.
        torch.get_num_threads()  # the first use in a thread takes over the default
        torch.set_num_threads(1)
        self._started.put(None)
        while (fetched := self._fetched.get()) is not None and not self._is_closed:
            (batch, number), content = fetched
            # Not while samples are fetched: what stores import and wait for draws as well.
            before = generators() if self.watches else b""
            try:
                batch.samples[number] = self._sample(int(batch.indices[number]), content)
                self._watch(before)
                if next(batch.left) == 0:
                    devices.of(self._reading.device).make_current()  # as above
                    whole = made(batch.samples, batch.indices, self._reading, keyed_draws)
                    self._watch(before)
                    batch.done.put(whole)
            except BaseException as error:  # as above
                batch.done.put(_Raised(error))
            del fetched, batch, content
        self._fetched.put(None)

    def _watch(self, before: bytes) -> None:
        if before and generators() != before:
            self.has_drawn = True

    def _sample(self, index: int, fetched: Any) -> Any:
        number, row = divmod(index, self._length)
        try:
            if isinstance(fetched, _Raised):
                raise fetched.error
            return self._dataset.decode(row, fetched, numbered(self._reading.draw, number))
        except SampleError as error:
            if not self._reading.skip:
                raise
            return Skipped.of(error)
        finally:
            del fetched
