"""Data sets for tests of reading: in two parts, that can be watched; that draw, wait and fail."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.utils.data import Dataset

from gpupool.core.errors import DataError, SampleError
from gpupool.data.reading.augmentation import keyed_draws
from gpupool.data.reading.samples import Draw
from gpupool.data.stores.threads import NAME
from tests.support.processes import until

TIMEOUT_S = 40.0


class Points:
    """Sample i is (uint8 tensor (3, 2, 2) of i % 256, i).

    Fetching takes up to `delay_s`, by chance; it waits at `gate` from index `closed_from` on.
    `damaged` raise SampleError when decoded, `missing` when fetched, `broken` DataError.
    """

    def __init__(self, num: int, delay_s: float = 0.0, closed_from: int = 10**9) -> None:
        self.num, self.delay_s, self.closed_from = num, delay_s, closed_from
        self.damaged: set[int] = set()
        self.missing: set[int] = set()
        self.broken: set[int] = set()
        self.gate, self.reached = threading.Event(), threading.Event()
        self.fetched: list[int] = []
        self.max_fetching = self.max_decoding = 0
        self._fetching = self._decoding = 0
        self._lock = threading.Lock()
        self._random = np.random.default_rng(0)

    def __len__(self) -> int:
        return self.num

    def fetch(self, index: int) -> int:
        with self._lock:
            self.fetched.append(index)
            self._fetching += 1
            self.max_fetching = max(self.max_fetching, self._fetching)
            delay_s = self.delay_s * self._random.random()
        if delay_s:
            time.sleep(delay_s)
        if index >= self.closed_from:
            self.reached.set()
            assert self.gate.wait(TIMEOUT_S)
        with self._lock:
            self._fetching -= 1
        if index in self.missing:
            raise SampleError(f"point {index} does not exist", f"points/{index}", "missing")
        return index

    def decode(self, index: int, fetched: int, draw: Draw | None) -> tuple[Any, int]:
        assert fetched == index
        with self._lock:
            self._decoding += 1
            self.max_decoding = max(self.max_decoding, self._decoding)
        try:
            if index in self.damaged:
                raise SampleError(f"point {index} is damaged", f"points/{index}", "damaged")
            if index in self.broken:
                raise DataError(f"the store refuses point {index}")
            with keyed_draws(draw, index):
                return self.sample(index), index
        finally:
            with self._lock:
                self._decoding -= 1

    def sample(self, index: int) -> torch.Tensor:
        return torch.full((3, 2, 2), index % 256, dtype=torch.uint8)


def join_loaders() -> None:
    until(lambda: num_threads() == 0, TIMEOUT_S)


def num_threads() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


def open_when(dataset: Points, condition: Callable[[], bool]) -> None:
    """Have a thread open the gate once the condition is true; in vain, it opens it all the same."""

    def wait() -> None:
        with contextlib.suppress(AssertionError):  # told by what the test then finds
            until(condition, TIMEOUT_S / 2)
        dataset.gate.set()

    threading.Thread(target=wait, daemon=True).start()


NUM = 60


class Drawing(Dataset[Any]):
    """Samples with numbers of numpy, Python and torch; one in seven draws nothing."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        drawn = torch.zeros(4, dtype=torch.float64)
        if index % 7:
            drawn[0], drawn[1] = random.random(), random.gauss(0, 1)
            drawn[2] = float(np.random.normal())
            drawn[3] = torch.rand((), dtype=torch.float64)
        return drawn, index


class Together(Drawing):
    """Samples that come several at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Plain(Dataset[Any]):
    """Samples that are waited for, computed, and say which process has read them."""

    def __init__(self, wait_s: float = 0.0, spin_s: float = 0.0) -> None:
        self.wait_s, self.spin_s = wait_s, spin_s

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.wait_s)
        until = time.thread_time() + self.spin_s
        while time.thread_time() < until:
            pass
        return torch.full((3,), float(index)), os.getpid()


class Hanging(Plain):
    """All but the first batch hangs."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(600.0 * (index >= 8))
        return super().__getitem__(index)


class Opening(Dataset[Any]):
    """Bytes of a file that is opened when the first of them is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO | None = None

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or self.path.open("rb", buffering=0)
        self.file.seek(index)
        time.sleep(0.001)  # so that another process could move it
        return self.file.read(1)[0], index


class Bad(Plain):
    """Some samples cannot be read, one ends its process, one raises."""

    def __getitem__(self, index: int) -> Any:
        if index % 10 == 3:
            raise SampleError(f"{index} is bad", str(index), "damaged")
        if index == 55:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 58:
            return self.inner(index)
        return super().__getitem__(index)

    def inner(self, index: int) -> Any:
        raise ValueError(f"sample {index}")
