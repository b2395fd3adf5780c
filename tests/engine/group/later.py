"""A device that lags behind the host, as a GPU does, as far as the engine asks it."""

from __future__ import annotations

import threading

import torch

from gpupool.data import device as devices
from gpupool.data.device import Counter, Device


class Later(Device):
    """A CPU that has `done` all its work when it is told so; then it raises its `failure`, once.

    Its counters stay at 0: no step is ever known to be complete.
    """

    lags = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.done = threading.Event()
        self.done.set()
        self.failure: RuntimeError | None = None

    def is_done(self) -> bool:
        if not self.done.is_set():
            return False
        error, self.failure = self.failure, None
        if error is not None:  # as CUDA, which reports an error to whoever asks next
            raise error
        return True

    def counter(self) -> Counter:
        return _Stuck()


class _Stuck(Counter):
    def advance(self) -> None:
        pass


def install() -> None:
    """Have it in the place of this process's CPU."""
    devices.put(Later())


def remove() -> None:
    """Have the CPU as it was."""
    devices.put(Device(torch.device("cpu")))
