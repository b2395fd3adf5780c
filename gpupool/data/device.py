"""What a device does with the work it is given: the only file that calls `torch.cuda`.

A CPU has computed when the call returns. A GPU is given work in the order of a stream and computes
later: the host runs ahead of it, by many steps of a training. Tests put a third device in the place
of the CPU, which lags as a GPU does (`tests/engine/group/later.py`). Opens no context on a GPU
before one is used.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, cast

import torch
from torch import Tensor

_SPIN_S = 0.0002  # so long a wait does not sleep: short cells lose nothing
_POLL_S = 0.0005


class Mark:
    """A place in the order of a device's work; on a CPU it is reached when it is marked."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        """Whether the device has come so far."""
        return True

    def synchronize(self) -> None:
        """Wait until it has; other threads run meanwhile."""

    def elapsed_time(self, end: Mark, /) -> float:
        """Milliseconds on the device from here to `end`; both are reached, and timed."""
        return 1000 * (end._at_s - self._at_s)


class Counter:
    """Counts what the device has completed. Reading it asks the device nothing."""

    _value = 0

    def advance(self) -> None:
        """One more, once the device has done what it was given before."""
        self._value += 1

    def value(self) -> int:
        """How many it has completed by now; from any thread."""
        return self._value


class Device:
    """A CPU."""

    lags = False
    """Whether the host runs ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        return "CPU"

    def make_current(self) -> None:
        """Make it the device of this thread, where libraries do not say which they mean."""

    def mark(self, *, timed: bool = False) -> Mark:
        """The place behind all that it has been given, in the stream of the moment."""
        return Mark()

    def is_done(self) -> bool:
        """Whether the stream of the moment is empty; waits for nothing.

        Raises RuntimeError if the context is lost, so that nothing works on it any more.
        """
        return True

    def synchronize(self) -> None:
        """Wait for all of its streams; other threads run meanwhile."""

    def wait(self) -> None:
        """As `synchronize`; an interrupt ends it while the stream of the moment has work.

        Raises RuntimeError: what the device has given instead of results.
        """
        began = time.perf_counter()
        while not self.is_done():
            if time.perf_counter() - began > _SPIN_S:
                time.sleep(_POLL_S)
        # Other streams, NCCL's too: they are rarely behind, and an abort of collectives ends it.
        self.synchronize()

    def counter(self) -> Counter:
        return Counter()

    def copy_to_host(self, source: Tensor) -> tuple[Tensor, Mark]:
        """Begin to copy a tensor into memory of the host: the copy, and where it is whole."""
        copy = self.host_buffer(source).copy_(source, non_blocking=True)
        return copy, self.mark()

    def host_buffer(self, like: Tensor) -> Tensor:
        """Memory of the host in this shape and layout, which the device can copy from and to."""
        return torch.empty_like(like, device="cpu", pin_memory=self.device.type == "cuda")

    def seed(self, key: int) -> None:
        """Set its random numbers; those of the CPU are another generator."""


class Cuda(Device):
    """A GPU of NVIDIA's; what is said to be in "the stream of the moment" is of this thread."""

    lags = True

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def uuid(self) -> str:
        """As the driver has it, without "GPU-" or "MIG-" before it."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def make_current(self) -> None:
        torch.cuda.set_device(self.device)

    def mark(self, *, timed: bool = False) -> Mark:
        """An event, which has the methods of a mark."""
        event: Any = torch.cuda.Event(enable_timing=timed)
        event.record(torch.cuda.current_stream(self.device))
        return cast(Mark, event)

    def is_done(self) -> bool:
        return torch.cuda.current_stream(self.device).query()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def counter(self) -> Counter:
        return _PinnedCounter(self.device)

    def seed(self, key: int) -> None:
        torch.cuda.default_generators[self.device.index].manual_seed(key)

    def memory(self) -> tuple[int, int]:
        """Bytes that torch keeps in this process, and all there are."""
        reserved = torch.cuda.memory_reserved(self.device)
        return reserved, torch.cuda.mem_get_info(self.device)[1]

    def free_cache(self) -> None:
        """Give back the memory that torch keeps for later tensors."""
        with contextlib.suppress(RuntimeError):  # a context that is lost gives nothing back
            torch.cuda.empty_cache()


class _PinnedCounter(Counter):
    """A number on the GPU, which its stream copies into pinned memory: two launches, some 8 us.

    Events would do, too, but a thread that asks for one can wait behind a full launch queue.
    """

    def __init__(self, device: torch.device) -> None:
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._done = torch.zeros((), dtype=torch.int64, pin_memory=True)
        self._seen = self._done.numpy()  # reading it makes no call of torch

    def advance(self) -> None:
        with torch.no_grad():
            self._count += 1
            self._done.copy_(self._count, non_blocking=True)

    def value(self) -> int:
        return int(self._seen)


_devices: dict[torch.device, Device] = {}


def of(device: torch.device | str) -> Device:
    """The device of this name; "cuda" is the current one of this thread."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _devices:
        _devices[device] = Cuda(device) if device.type == "cuda" else Device(device)
    return _devices[device]


def put(device: Device) -> None:
    """Have `of` give this one for its name."""
    _devices[device.device] = device


def in_use() -> Device | None:
    """The device that may still compute what this process has given it; None without one.

    Nothing is initialised for the answer. Of several GPUs it is the current one of this thread.
    """
    if torch.cuda.is_initialized():
        return of("cuda")
    return next((device for device in _devices.values() if device.lags), None)


def gpu_in_use() -> Cuda | None:
    """The current GPU, if this process has begun to use one."""
    current = in_use()
    return current if isinstance(current, Cuda) else None


def has_gpu() -> bool:
    return torch.cuda.is_available()
