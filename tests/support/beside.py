"""A device whose side streams are watched: an order that a GPU needs is seen on a CPU."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gpupool.data import device as devices
from gpupool.data.device import Aside, Device, Handover, Mark, _Reached


class Watched(Device):
    """A CPU with side streams. What was made in one is poison until it has been taken.

    `steps` are what each thread has done, by its name, in order: "hand over" and "take".
    """

    lags = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.steps: defaultdict[str, list[str]] = defaultdict(list)
        self.num_streams = self.num_marks = 0
        self.reached: list[int] = []
        """The marks that were waited for."""

    def add(self, step: str) -> None:
        self.steps[threading.current_thread().name].append(step)

    def aside(self) -> Aside:
        self.num_streams += 1
        return _Stream(self)

    def mark(self, *, timed: bool = False) -> Mark:
        self.num_marks += 1
        return _Numbered(self, self.num_marks)


class _Numbered(_Reached):
    def __init__(self, device: Watched, number: int) -> None:
        super().__init__(0.0)
        self._device, self._number = device, number

    def synchronize(self) -> None:
        self._device.reached.append(self._number)


class _Stream(Aside):
    def __init__(self, device: Watched) -> None:
        self._device = device
        self._is_entered = False

    def __enter__(self) -> None:
        assert not self._is_entered, "two readings use one stream"
        self._is_entered = True

    def __exit__(self, *_: object) -> None:
        self._is_entered = False

    def hand_over(self, tensors: Iterable[Tensor]) -> Handover:
        assert self._is_entered
        return _Poisoned(self._device, list(tensors))


class _Poisoned(Handover):
    def __init__(self, device: Watched, tensors: list[Tensor]) -> None:
        self._device = device
        self._later = [(tensor, tensor.clone()) for tensor in tensors]
        for tensor in tensors:
            tensor.fill_(77)
        device.add("hand over")

    def take(self) -> None:
        self._device.add("take")
        for tensor, value in self._later:
            tensor.copy_(value)


@contextmanager
def placed(device: Device) -> Iterator[None]:
    """Have `devices.of` give this one for its name, inside."""
    before = devices._devices.get(device.device)
    devices.put(device)
    try:
        yield
    finally:
        del devices._devices[device.device]
        if before:
            devices.put(before)


@contextmanager
def watched() -> Iterator[Watched]:
    """Have the CPU be watched, inside."""
    here = Watched(torch.device("cpu"))
    with placed(here):
        yield here
