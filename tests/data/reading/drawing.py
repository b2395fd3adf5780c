"""Data sets that draw, wait and fail, for tests of how they are read."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.utils.data import Dataset

from gpupool.core.errors import SampleError

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
    """What is read in what way: waiting if `wait_s`, else computing for `spin_s`."""

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
