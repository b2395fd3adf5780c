"""Batches of samples: one of them here, or many, read ahead by threads.

Runs on engines, and in processes that read for them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from gpupool.core.errors import SampleError
from gpupool.data import device as devices
from gpupool.data.reading.augmentation import DrawsError, Watch, keyed_draws
from gpupool.data.reading.collate import Batch, batch_of
from gpupool.data.reading.pipeline import THREAD_NAME, Owner, Reading
from gpupool.data.reading.samples import NUM_FETCH_THREADS, Samples, Skipped
from gpupool.data.reading.shards import Indices
from gpupool.data.reading.subsets import Nested
from gpupool.data.stores.threads import join_threads, reading_threads, start_threads

T = TypeVar("T")

QUICK_BYTES = 1 << 18  # of a batch that lies in memory: about 0.03 ms


# ---- a batch, in this thread ----------------------------------------------------------------


@dataclass
class Noticed:
    """What reading a data set has shown: whether samples draw from generators that threads share,
    or, in `__getitems__`, whether they draw at all."""

    draws: bool = False


def read_here(
    dataset: Any, batches: Sequence[Indices], reading: Reading, noticed: Noticed | None = None
) -> Generator[Batch | None, None, None]:
    """Each batch when it is asked for, in the thread that asks, as `read_alone`."""
    noticed = noticed or Noticed()
    for indices in batches:
        yield read_alone(dataset, indices, reading, noticed)


def read_alone(dataset: Any, indices: Indices, reading: Reading, noticed: Noticed) -> Batch | None:
    """A batch, read where nothing else draws from the global generators meanwhile.

    So these can be keyed for each sample, too; afterwards they are where they were.
    """
    if reading.draw is None or not may_draw(dataset, reading):
        return read(dataset, indices, reading)
    watch = Watch()
    if not noticed.draws:
        try:
            batch = read(dataset, indices, reading)
            if not watch.has_moved():
                return batch
        except DrawsError:
            pass
        except Exception:
            if not watch.has_moved():  # else it may be the fault of what was drawn
                raise
        noticed.draws = True
    try:
        keyed = replace(reading, draw=replace(reading.draw, keys_all=True))
        return read(dataset, indices, keyed)
    finally:
        watch.restore()


def read(dataset: Any, indices: Indices, reading: Reading) -> Batch | None:
    """A batch, in this thread. Raises DrawsError if its samples must be read one by one."""
    if len(indices) == 0:
        return None
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2 and reading.collate is None:
        inputs, targets = (_rows(tensor, indices, reading) for tensor in dataset.tensors)
        return Batch(inputs, targets, len(indices))
    places = [int(index) for index in indices]
    # asked once: a protocol's isinstance looks at every method, each time
    if isinstance(dataset, Samples):
        samples = list(_decoded(dataset, places, reading))
    elif reads_many(dataset) and not (reading.draw and reading.draw.keys_all):
        samples = _read_at_once(dataset, places, reading)
    else:
        samples = list(_items(dataset, places, reading))
    return batch_of(samples, reading.pin, reading.collate_of(indices), places)


def reads_many(dataset: Any) -> bool:
    """Whether a data set gives several samples in one call of its own."""
    # A Subset has `__getitems__` in any case.
    if type(dataset) is Subset:
        return reads_many(dataset.dataset)
    return hasattr(dataset, "__getitems__")


def may_draw(dataset: Any, reading: Reading) -> bool:
    """Whether code of the user's makes a sample or a batch."""
    if reading.collate is not None:
        return True
    if isinstance(dataset, Nested):
        return any(may_draw(part, reading) for part in dataset.parts)
    if isinstance(dataset, Samples):
        return getattr(dataset, "transform", dataset) is not None
    return type(dataset) is not TensorDataset


def is_quick(dataset: Any, batches: Sequence[Indices], reading: Reading) -> bool:
    """Whether a batch is read in less time than a thread needs to hand it over."""
    if type(dataset) is not TensorDataset or not len(dataset) or reading.collate is not None:
        return False
    num_bytes = sum(tensor.nbytes for tensor in dataset.tensors) // len(dataset)
    return num_bytes * max(map(len, batches), default=0) <= QUICK_BYTES


def _read_at_once(dataset: Any, places: list[int], reading: Reading) -> list[Any]:
    draws = keyed_draws(reading.draw, places[0])
    try:
        with draws:
            samples = list(dataset.__getitems__(places))
    except SampleError:
        if not reading.skip:
            raise
        return list(_items(dataset, places, reading))
    # What one call draws for several samples is not that of each of them alone.
    if getattr(draws, "has_drawn", False):
        raise DrawsError
    return samples


def _items(dataset: Any, places: list[int], reading: Reading) -> Iterator[Any]:
    for place in places:
        try:
            with keyed_draws(reading.draw, place):
                yield dataset[place]
        except SampleError as error:
            if not reading.skip:
                raise
            yield Skipped.of(error)


def _decoded(dataset: Samples, places: list[int], reading: Reading) -> Iterator[Any]:
    num = min(NUM_FETCH_THREADS, len(places)) if reading.depth else 1
    with reading_threads(num, "gpupool-fetch") if num > 1 else nullcontext() as pool:
        ahead = [pool.submit(dataset.fetch, place) for place in places] if pool else None
        for number, place in enumerate(places):
            try:
                content = ahead[number].result() if ahead else dataset.fetch(place)
                yield dataset.decode(place, content, reading.draw)
            except SampleError as error:
                if not reading.skip:
                    raise
                yield Skipped.of(error)


def _rows(tensor: Tensor, indices: Indices, reading: Reading) -> Tensor:
    """Rows of a tensor as a batch: what collating them one by one comes to, in one go."""
    rows = tensor[torch.tensor(indices, device="cpu")]
    return rows.pin_memory() if reading.pin and not rows.is_cuda else rows


# ---- many batches, by threads ---------------------------------------------------------------


def read_ahead(
    reads: Generator[T, None, None], num: int, reading: Reading
) -> Generator[T, None, None]:
    """The `num` batches of `reads`, which a thread runs `reading.depth` ahead, and closes."""
    return in_order([lambda number: next(reads)], num, reading, reading.depth, on_end=reads.close)


def in_order(
    works: Sequence[Callable[[int], T]],
    num: int,
    reading: Reading,
    num_ahead: int,
    *,
    given: list[T] | None = None,
    on_end: Callable[[], None] = lambda: None,
    until: Callable[[], bool] = lambda: False,
) -> Generator[T, None, None]:
    """What `works` give for 0, 1, ... up to `num`, each in a thread of its own, `num_ahead` ahead.

    Before these come those `given`, while others are read. `on_end` is called in the thread that
    ends last. No more are begun when `until` is true.
    """
    given = given or []
    reader = _Reader(works, reading, on_end)
    owner = Owner()
    weakref.finalize(owner, reader.close)  # should an interrupt hit the `finally` below
    ahead: deque[SimpleQueue[T | BaseException]] = deque()
    remaining = iter(range(num))

    def read_one_more() -> None:
        if until():
            return
        for number in remaining:
            ahead.append(SimpleQueue())
            reader.wanted.put((number, ahead[-1]))
            return

    try:
        threads = start_threads(THREAD_NAME, reader.runs())
        for _ in range(num_ahead):
            read_one_more()
        while given:
            yield given.pop(0)  # it is the caller's then
        while ahead:
            batch = _got(ahead.popleft())
            read_one_more()
            yield batch
            del batch  # it is the caller's now
        reader.close()
        join_threads(threads)
    except DrawsError:  # what is read again must not meet what they still draw
        reader.close()
        join_threads(threads, threading.TIMEOUT_MAX)
        raise
    finally:
        # Not waiting: a stop by the user must not hang on a store that does not answer.
        reader.close()


class _Reader(Generic[T]):
    """Reads what is wanted, in threads, until it is closed."""

    def __init__(
        self, works: Sequence[Callable[[int], T]], reading: Reading, on_end: Callable[[], None]
    ) -> None:
        self.works, self.reading, self.on_end = works, reading, on_end
        self.wanted: SimpleQueue[tuple[int, SimpleQueue[T | BaseException]] | None] = SimpleQueue()
        self.is_closed = False
        self._running = [None] * len(works)  # one less with each thread that ends

    def close(self) -> None:
        self.is_closed = True
        self.wanted.put(None)

    def runs(self) -> list[Callable[[], None]]:
        """What each thread does."""
        return [partial(self._run, work) for work in self.works]

    def _run(self, work: Callable[[int], T]) -> None:
        try:
            while (ticket := self.wanted.get()) is not None and not self.is_closed:
                number, answer = ticket
                try:
                    devices.of(self.reading.device).make_current()
                    answer.put(work(number))
                except BaseException as error:  # raised again in the thread that asks
                    answer.put(error)
                del ticket, answer
        finally:
            self.wanted.put(None)
            self._running.pop()
            if not self._running:
                self.on_end()


def _got(answer: SimpleQueue[T | BaseException]) -> T:
    result = answer.get()
    if not isinstance(result, BaseException):
        return result
    try:
        raise result
    finally:
        del result  # its traceback holds this frame
