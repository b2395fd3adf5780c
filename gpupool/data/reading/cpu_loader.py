"""Batches of samples that the CPU decodes, read ahead by threads. Runs on engines."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from gpupool.core.errors import SampleError
from gpupool.data import device as devices
from gpupool.data.reading.augmentation import keyed_draws
from gpupool.data.reading.collate import Batch, batch_of
from gpupool.data.reading.pipeline import (
    THREAD_NAME,
    Owner,
    Reading,
    read_in_threads,
)
from gpupool.data.reading.samples import Samples, Skipped
from gpupool.data.reading.shards import Indices
from gpupool.data.stores.threads import join_threads, start_threads

T = TypeVar("T")

QUICK_BYTES = 1 << 18  # of a batch that lies in memory: about 0.03 ms


def read_on_cpu(
    dataset: Any, batches: Sequence[Indices], reading: Reading
) -> Generator[Batch | None, None, None]:
    """As `load_batches`, with samples that are decoded as the data set does it."""
    if reading.depth == 0 or _is_quick(dataset, batches):
        return _read_here(dataset, batches, reading)
    if isinstance(dataset, Samples):
        return read_in_threads(dataset, batches, reading)
    return read_ahead(_read_here(dataset, batches, reading), len(batches), reading)


def _is_quick(dataset: Any, batches: Sequence[Indices]) -> bool:
    """Whether a batch is read in less time than a thread needs to hand it over."""
    if type(dataset) is not TensorDataset or not len(dataset):
        return False
    num_bytes = sum(tensor.nbytes for tensor in dataset.tensors) // len(dataset)
    return num_bytes * max(map(len, batches), default=0) <= QUICK_BYTES


def _read_here(
    dataset: Any, batches: Sequence[Indices], reading: Reading
) -> Generator[Batch | None, None, None]:
    # asked once: a protocol's isinstance looks at every method, each time
    is_ours = isinstance(dataset, Samples)
    for indices in batches:
        yield _read(dataset, indices, reading, is_ours)


def read_ahead(
    reads: Generator[T, None, None], num: int, reading: Reading
) -> Generator[T, None, None]:
    """The `num` batches of `reads`, which a thread runs `reading.depth` ahead, and closes."""
    reader = _Reader(reads, reading)
    owner = Owner()
    weakref.finalize(owner, reader.close)  # should an interrupt hit the `finally` below
    ahead: deque[SimpleQueue[T | BaseException]] = deque()
    remaining = iter(range(num))

    def read_one_more() -> None:
        for _ in remaining:
            ahead.append(SimpleQueue())
            reader.wanted.put(ahead[-1])
            return

    try:
        threads = start_threads(THREAD_NAME, [reader.run])
        for _ in range(reading.depth):
            read_one_more()
        while ahead:
            batch = _got(ahead.popleft())
            read_one_more()
            yield batch
            del batch  # it is the caller's now
        reader.close()
        join_threads(threads)
    finally:
        # Not waiting: a stop by the user must not hang on a store that does not answer.
        reader.close()


class _Reader(Generic[T]):
    """Reads what is wanted, in a thread, until it is closed."""

    def __init__(self, reads: Generator[T, None, None], reading: Reading) -> None:
        self.reads, self.reading = reads, reading
        self.wanted: SimpleQueue[SimpleQueue[T | BaseException] | None] = SimpleQueue()
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        self.wanted.put(None)

    def run(self) -> None:
        with closing(self.reads) as reads:
            while (answer := self.wanted.get()) is not None and not self.is_closed:
                try:
                    devices.of(self.reading.device).make_current()
                    answer.put(next(reads))
                except BaseException as error:  # raised again in the thread that asks
                    answer.put(error)


def _got(answer: SimpleQueue[T | BaseException]) -> T:
    result = answer.get()
    if not isinstance(result, BaseException):
        return result
    try:
        raise result
    finally:
        del result  # its traceback holds this frame


def _read(dataset: Any, indices: Indices, reading: Reading, is_ours: bool) -> Batch | None:
    """A batch, in this thread."""
    if len(indices) == 0:
        return None
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2 and reading.collate is None:
        inputs, targets = (_rows(tensor, indices, reading) for tensor in dataset.tensors)
        return Batch(inputs, targets, len(indices))
    places = [int(index) for index in indices]
    if is_ours or not hasattr(dataset, "__getitems__"):
        read = _read_one_by_one(dataset, places, reading, is_ours)
    else:
        read = _read_at_once(dataset, places, reading)
    return batch_of(read, reading.pin, reading.collate)


def _read_at_once(dataset: Any, places: list[int], reading: Reading) -> list[Any]:
    try:
        return list(dataset.__getitems__(places))
    except SampleError:
        if not reading.skip:
            raise
        return _read_one_by_one(dataset, places, reading, is_ours=False)


def _rows(tensor: Tensor, indices: Indices, reading: Reading) -> Tensor:
    """Rows of a tensor as a batch: what collating them one by one comes to, in one go."""
    rows = tensor[torch.tensor(indices, device="cpu")]
    return rows.pin_memory() if reading.pin and not rows.is_cuda else rows


def _read_one_by_one(dataset: Any, places: list[int], reading: Reading, is_ours: bool) -> list[Any]:
    return list(_samples(dataset, places, reading, is_ours))


def _samples(dataset: Any, places: list[int], reading: Reading, is_ours: bool) -> Iterator[Any]:
    for place in places:
        try:
            if is_ours:
                yield dataset.decode(place, dataset.fetch(place), reading.draw)
            else:
                with keyed_draws(reading.draw, place):
                    yield dataset[place]
        except SampleError as error:
            if not reading.skip:
                raise
            yield Skipped.of(error)
