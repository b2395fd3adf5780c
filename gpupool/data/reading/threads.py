"""Reads ahead by threads. Runs on engines.

    64 threads fetch ──> as many decode as there are cores; the last of a batch makes it ──> next()

The thread that asks for batches may be interrupted anywhere: see `gpupool.data.stores.threads`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice, repeat
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from threadpoolctl import ThreadpoolController

from gpupool.core.errors import SampleError
from gpupool.data import device as devices
from gpupool.data.reading.augmentation import generators, keyed_draws, restore
from gpupool.data.reading.batches import Batch, Reading, made
from gpupool.data.reading.samples import NUM_FETCH_THREADS, Samples, Skipped, numbered
from gpupool.data.reading.shards import Indices
from gpupool.data.reading.trees import tensors
from gpupool.data.stores.threads import Outcome, Threads, in_threads

T = TypeVar("T")
Reads = Generator[Batch, None, None]
DEPTH = 2  # batches that are read ahead
_OPENMP = ThreadpoolController().select(user_api="openmp")  # torch's, which is loaded
_MIN_ROWS = 3 * NUM_FETCH_THREADS  # under way, so that no thread waits for the next batch
_MAX_BYTES = 256 << 20  # of these, beyond the batches that are read ahead in any case


def use_one_core() -> Any:
    """What this thread computes with OpenMP takes one core; as a context, until that ends."""
    torch.get_num_threads()  # the first use in a thread takes over the default
    return _OPENMP.limit(limits=1)


def read_ahead(reads: Iterator[T], reading: Reading) -> Generator[T, None, None]:
    """That of `reads`, which a thread runs ahead."""

    def read(_: None) -> list[T]:
        devices.of(reading.device).make_current()  # pinning would open a context on GPU 0
        return list(islice(reads, 1))

    with closing(in_threads(read, repeat(None), 1, ahead=1 + DEPTH)) as answers:
        while found := next(answers):
            yield found.pop()  # it is the caller's now


def read_in_threads(dataset: Samples, batches: Sequence[Indices], reading: Reading) -> Reads:
    """Batches as of `load_batches`. They end before the first one that has a sample if samples draw
    from generators that threads share."""
    reader = _Reader(dataset, reading)
    left, under_way = deque(batches), deque[_Batch]()
    row_bytes, before = 0, generators()

    def read_more() -> None:
        while left:
            rows = sum(len(batch.samples) for batch in under_way)
            is_small = rows < _MIN_ROWS and 0 < rows * row_bytes < _MAX_BYTES
            if len(under_way) >= DEPTH and not is_small:
                return
            under_way.append(reader.read(left.popleft()))

    try:
        reader.start(sum(map(len, batches)))
        read_more()
        while under_way:
            # Held here: a thread that frees its tensors while Python ends would abort the process.
            first = under_way.popleft()
            batch = first.done.get().result()
            if reader.has_drawn and not row_bytes:
                reader.close()
                for thread in reader.threads:  # what is read again must not meet what they draw
                    thread.join()
                restore(before)
                return
            if batch.num:
                nbytes = sum(one.nbytes for one in tensors((batch.inputs, batch.targets)))
                row_bytes = max(1, nbytes // batch.num)
                reader.watches = False
            read_more()
            yield batch
            del batch  # it is the caller's now
    finally:
        # Not waiting: a stop by the user must not hang on a store that does not answer.
        reader.close()


class _Batch:
    """A batch under way, whose last sample makes it."""

    def __init__(self, indices: Indices) -> None:
        self.indices = indices
        self.samples: list[Any] = [None] * len(indices)
        self.left = iter(range(len(indices) - 1, -1, -1))  # two threads never get the same of it
        self.done: SimpleQueue[Outcome[Any]] = SimpleQueue()


class _Reader:
    def __init__(self, dataset: Samples, reading: Reading) -> None:
        self._dataset, self._reading = dataset, reading
        self._length = len(dataset)
        self._fetching, self._decoding = Threads(), Threads()
        self.watches = reading.draw is not None  # until the first batch is there
        self.has_drawn = False  # a sample, from what threads share

    def start(self, num_samples: int) -> None:
        self.threads = self._fetching.start(min(NUM_FETCH_THREADS, num_samples))
        # Each image is worked on by one core, as there are more images than cores.
        self.threads += self._decoding.start(torch.get_num_threads(), use_one_core)

    def read(self, indices: Indices) -> _Batch:
        batch = _Batch(indices)
        for number in range(len(indices)):
            self._fetching.do(partial(self._fetch, batch, number))
        return batch

    def close(self) -> None:
        self._fetching.close()
        self._decoding.close()

    def _fetch(self, batch: _Batch, number: int) -> None:
        row = int(batch.indices[number]) % self._length
        fetched = Outcome.of(partial(self._dataset.fetch, row))
        self._decoding.do(partial(self._decode, batch, number, fetched))

    def _decode(self, batch: _Batch, number: int, fetched: Outcome[Any]) -> None:
        # Not while samples are fetched: what stores import and wait for draws as well.
        before = generators() if self.watches else b""
        done = Outcome.of(partial(self._made, batch, number, fetched))
        if before and generators() != before:
            self.has_drawn = True
        if done.error or done.value:
            batch.done.put(done)

    def _made(self, batch: _Batch, number: int, fetched: Outcome[Any]) -> Batch | None:
        """The batch, if this was its last sample."""
        again, row = divmod(int(batch.indices[number]), self._length)
        draw = numbered(self._reading.draw, again)
        try:
            batch.samples[number] = self._dataset.decode(row, fetched.result(), draw)
        except SampleError as error:
            if not self._reading.skip:
                raise
            batch.samples[number] = Skipped.of(error)
        if next(batch.left):
            return None
        devices.of(self._reading.device).make_current()  # as above
        return made(batch.samples, batch.indices, self._reading, keyed_draws)
