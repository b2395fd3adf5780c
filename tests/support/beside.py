"""A device whose side streams are watched: an order that a GPU needs is seen on a CPU."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpupool.data import device as devices
from gpupool.data.device import Aside, Device, Handover, Mark, _Reached

_DECODERS = ("image::decode_jpeg", "image::decode_jpegs_cuda")


class Watched(Device):
    """A CPU with side streams. What was made in one is poison until it has been taken.

    `steps` are what each thread has done, by its name, in order: "empty", "decode", "work" (any
    other operator), "hand over", "take" and "free".
    """

    lags = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.steps: defaultdict[str, list[str]] = defaultdict(list)
        self.num_streams = self.num_marks = 0
        self.reached: list[int] = []
        """The marks that were waited for."""

    def add(self, step: str) -> None:
        """Operators that follow each other count as one."""
        steps = self.steps[threading.current_thread().name]
        if step not in ("work", "decode") or steps[-1:] != [step]:
            steps.append(step)

    def aside(self) -> Aside:
        self.num_streams += 1
        return _Stream(self)

    def mark(self, *, timed: bool = False) -> Mark:
        self.num_marks += 1
        return _Numbered(self, self.num_marks)

    def free_cache(self) -> None:
        self.add("free")


class _Numbered(_Reached):
    def __init__(self, device: Watched, number: int) -> None:
        super().__init__(0.0)
        self._device, self._number = device, number

    def synchronize(self) -> None:
        self._device.reached.append(self._number)


class _Stream(Aside):
    def __init__(self, device: Watched) -> None:
        self._device = device
        self._entered: list[_Seen] = []

    def __enter__(self) -> None:
        assert not self._entered, "two readings use one stream"
        self._entered.append(_Seen(self._device))
        self._entered[-1].__enter__()

    def __exit__(self, *_: object) -> None:
        self._entered.pop().__exit__(None, None, None)

    def synchronize(self) -> None:
        self._device.add("empty")

    def hand_over(self, tensors: Iterable[Tensor]) -> Handover:
        assert self._entered
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


class _Seen(TorchDispatchMode):
    """Belongs to the thread that enters it, as the stream of the moment does."""

    def __init__(self, device: Watched) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_decoder = func.name().split(".")[0] in _DECODERS
        self._device.add("decode" if is_decoder else "work")
        return func(*args, **(kwargs or {}))


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
def watched(device: str = "cpu") -> Iterator[Watched]:
    """Have the device be watched, inside."""
    here = Watched(torch.device(device))
    with placed(here):
        yield here
