"""Reads ahead by threads. Runs on engines.

    64 threads fetch ──> as many decode as there are cores ──> one makes batches ──> next()

The thread that asks for batches may be interrupted anywhere, in the middle of Python's own locks
too. So it takes none that others need: it puts into queues and gets from them, which are written in
C, and one None that the threads hand on ends them all. They are daemons: a store that never answers
keeps no process alive.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch

from gpupool.core.errors import SampleError
from gpupool.data import device as devices
from gpupool.data.reading.augmentation import DrawsError, generators, keyed_draws, restore
from gpupool.data.reading.collate import Batch
from gpupool.data.reading.rows import Reading, made
from gpupool.data.reading.samples import NUM_FETCH_THREADS, Draw, Samples, Skipped, numbered
from gpupool.data.reading.shards import Indices
from gpupool.data.reading.trees import tensors
from gpupool.data.stores.retry import try_until
from gpupool.data.stores.threads import join_threads, start_threads

T = TypeVar("T")
Reads = Generator[Batch | None, None, None]
THREAD_NAME = "gpupool-loader"
_MIN_ROWS = 2 * NUM_FETCH_THREADS  # under way, so that no thread waits for the next batch
_MAX_BYTES = 256 << 20  # of these, beyond the batches that are read ahead in any case

_POLL_S = 0.5  # of the thread that makes batches: whether anybody wants one


class _Answer(NamedTuple):
    value: Any
    error: BaseException | None = None

    def get(self) -> Any:
        if self.error is None:
            return self.value
        try:
            raise self.error
        finally:
            del self  # its traceback holds this frame


class _Asked(NamedTuple):
    row: int
    draw: Draw | None
    answer: SimpleQueue[_Answer]


# ---- one thread, for any generator ---------------------------------------------------------------


def read_ahead(
    reads: Generator[T, None, None],
    reading: Reading,
    *,
    given: Sequence[T] = (),
    on_close: Callable[[], None] = lambda: None,
) -> Generator[T, None, None]:
    """What is `given`, then that of `reads`: a thread runs it, `depth` ahead, and closes it.

    `on_close` is called when nobody asks for more.
    """
    wanted: SimpleQueue[bool] = SimpleQueue()
    answers: SimpleQueue[_Answer | None] = SimpleQueue()

    def run() -> None:
        with closing(reads):
            try:
                devices.of(reading.device).make_current()  # pinning would open a context on GPU 0
                while wanted.get():
                    answers.put(_Answer(next(reads)))
            except StopIteration:
                answers.put(None)
            except BaseException as error:  # raised again in the thread that asks
                answers.put(_Answer(None, error))

    def close() -> None:
        wanted.put(False)
        on_close()

    owner = _Owner()
    weakref.finalize(owner, close)  # should an interrupt hit the `finally` below
    left = list(given)
    del given
    try:
        start_threads(THREAD_NAME, [run])
        for _ in range(reading.depth):
            wanted.put(True)
        while left:
            yield left.pop(0)  # it is the caller's then
        while (answer := answers.get()) is not None:
            wanted.put(True)
            value = answer.get()
            del answer
            yield value
            del value  # it is the caller's now
    finally:
        # Not waiting: a stop by the user must not hang on a store that does not answer.
        close()


class _Owner:
    """Gone when the iterator is."""


# ---- many threads, for data sets of ours -----------------------------------------------------


def read_in_threads(dataset: Samples, batches: Sequence[Indices], reading: Reading) -> Reads:
    """The samples of each entry of `batches`, in order; None if it is empty.

    The threads start with the first `next()`, and end with the iterator, however that ends. That
    raises DrawsError if the samples draw from generators that threads share.
    """
    threads = Threads(dataset, sum(map(len, batches)), skip=reading.skip)
    reads = _batches(batches, reading, threads, len(dataset))
    return read_ahead(reads, reading, on_close=threads.close)


class Threads:
    """Threads that read up to `num` samples: many fetch, as many decode as there are cores."""

    def __init__(self, dataset: Samples, num: int, *, skip: bool = False) -> None:
        self._dataset, self._skip = dataset, skip
        self._num = min(NUM_FETCH_THREADS, num)
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        self._fetched: SimpleQueue[tuple[_Asked, Any] | None] = SimpleQueue()
        self._started: SimpleQueue[None] = SimpleQueue()
        self._running: list[threading.Thread] = []
        self._is_closed = False

    def start(self) -> None:
        """Start them."""
        num_cores = torch.get_num_threads()
        works = [self._fetch] * self._num + [self._decode] * num_cores
        self._running = start_threads(THREAD_NAME, works)
        for _ in range(num_cores):
            self._started.get()
        # What a thread sets for itself is also the default of threads that are yet to come.
        torch.set_num_threads(num_cores)

    def read(self, row: int, draw: Draw | None) -> SimpleQueue[_Answer]:
        """Where the sample will be, or a `Skipped`."""
        answer: SimpleQueue[_Answer] = SimpleQueue()
        self._asked.put(_Asked(row, draw, answer))
        return answer

    def result(self, answer: SimpleQueue[_Answer]) -> Any:
        """What was read; raises Empty if nobody reads any more."""
        while True:
            try:
                return answer.get(timeout=_POLL_S).get()
            except Empty:
                if self._is_closed:
                    raise

    def close(self) -> None:
        """End them: those that wait for work at once, others when they come back."""
        self._is_closed = True
        self._asked.put(None)
        self._fetched.put(None)

    def join(self) -> None:
        """Wait for their end."""
        join_threads(self._running, threading.TIMEOUT_MAX)

    def _fetch(self) -> None:
        try_until(lambda: self._is_closed)
        while (asked := self._asked.get()) is not None and not self._is_closed:
            try:
                self._fetched.put((asked, self._dataset.fetch(asked.row)))
            except BaseException as error:  # raised again in the thread that asks
                self._fail(asked, error)
            del asked
        self._asked.put(None)

    def _decode(self) -> None:
        # Each image is worked on by one thread, as there are more of them.
        torch.get_num_threads()  # the first use in a thread takes over the default
        torch.set_num_threads(1)
        self._started.put(None)
        while (fetched := self._fetched.get()) is not None and not self._is_closed:
            asked, content = fetched
            try:
                asked.answer.put(_Answer(self._dataset.decode(asked.row, content, asked.draw)))
            except BaseException as error:  # as above
                self._fail(asked, error)
            del fetched, asked, content
        self._fetched.put(None)

    def _fail(self, asked: _Asked, error: BaseException) -> None:
        if self._skip and isinstance(error, SampleError):
            asked.answer.put(_Answer(Skipped.of(error)))
        else:
            asked.answer.put(_Answer(None, error))


def _batches(batches: Sequence[Indices], reading: Reading, threads: Threads, length: int) -> Reads:
    """The batches, with so many samples under way that the threads have something to do."""
    left = deque(batches)
    under_way: deque[tuple[Indices, list[SimpleQueue[_Answer]]]] = deque()
    row_bytes, before = 0, generators()

    def has_room() -> bool:
        rows = sum(len(answers) for _, answers in under_way)
        is_small = rows < _MIN_ROWS and 0 < rows * row_bytes < _MAX_BYTES
        return len(under_way) < reading.depth or is_small

    def read(index: int) -> SimpleQueue[_Answer]:
        number, row = divmod(int(index), length)
        return threads.read(row, numbered(reading.draw, number))

    with closing(threads):
        threads.start()
        while left or under_way:
            while left and has_room():
                indices = left.popleft()
                under_way.append((indices, list(map(read, indices))))
            indices, answers = under_way.popleft()
            samples = [threads.result(one) for one in answers]
            batch = made(samples, indices, reading, keyed_draws) if samples else None
            del samples
            # Until the first batch is there, whoever asks for it waits: nobody else draws.
            if reading.draw is not None and not row_bytes and generators() != before:
                threads.close()
                threads.join()  # what is read again must not meet what they still draw
                restore(before)
                raise DrawsError
            if batch is not None and batch.num:
                nbytes = sum(one.nbytes for one in tensors((batch.inputs, batch.targets)))
                row_bytes = max(1, nbytes // batch.num)
            yield batch
            del batch  # it is the caller's now
