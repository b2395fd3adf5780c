"""How busy, full and warm the device of this rank is, asked once a second. Runs on engines.

Where the driver, or the card, has no answer, a value is None, or what torch knows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import psutil
import torch

from gpupool.core.machine import limits
from gpupool.core.machine.nvml import Gauges, read_gauges
from gpupool.data import device as devices

EVERY_S = 1.0
_LEAST_S = 0.05  # of wall time, for a share of it to say something


class Reading(NamedTuple):
    """As in `gpupool.core.wire.events.RankEvent`."""

    utilization: float | None = None
    memory_bytes: int | None = None
    total_memory_bytes: int | None = None
    temperature_c: int | None = None


Probe = Callable[[], Reading]


def make_probe(device: torch.device) -> Probe:
    """What reads the state of this device: a GPU, or this process on its CPU threads."""
    return _gpu_probe(device) if device.type == "cuda" else CpuProbe()


class CpuProbe:
    """This process: CPU time over wall time times torch's threads, since the last reading."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._process = psutil.Process()
        self._num_threads = torch.get_num_threads()
        # In a container the limit of its cgroup is what ends the process, not the machine's memory.
        of_machine = psutil.virtual_memory().total
        self._total = min(of_machine, limits.memory_limit() or of_machine)
        self._at, self._cpu = clock(), cpu_clock()
        self._share: float | None = None

    def __call__(self) -> Reading:
        now, cpu = self._clock(), self._cpu_clock()
        if now - self._at >= _LEAST_S:  # else the clocks' own steps would show
            share = (cpu - self._cpu) / (now - self._at) / self._num_threads
            self._share, self._at, self._cpu = min(1.0, share), now, cpu
        return Reading(self._share, self._process.memory_info().rss, self._total)


def _gpu_probe(device: torch.device) -> Probe:
    """The driver's, of the GPU that torch computes on; torch's own figures if it does not know it.

    torch leaves the kind out of the UUID: "GPU-", or "MIG-" of an instance of one.
    """
    gpu = devices.Cuda(device)
    for kind in ("GPU-", "MIG-"):
        uuid = f"{kind}{gpu.uuid.removeprefix(kind)}"
        if read_gauges(uuid) is not None:
            return partial(of_driver, uuid)
    return partial(_of_torch, gpu)


def of_driver(uuid: str) -> Reading:
    """What the driver says of a GPU, or of an instance of one."""
    found = read_gauges(uuid) or Gauges()
    percent = found.utilization_percent
    return Reading(
        None if percent is None else percent / 100,
        found.used_memory_bytes,
        found.total_memory_bytes,
        found.temperature_c,
    )


def _of_torch(gpu: devices.Cuda) -> Reading:
    """What torch holds of the GPU, of all there is."""
    memory = gpu.memory()
    return Reading(None, memory.reserved, memory.total)


class Sampler:
    """Reads a probe once a second in a thread, until it is closed."""

    def __init__(self, make: Callable[[], Probe], every_s: float = EVERY_S) -> None:
        self._make, self._every_s = make, every_s
        self._newest: Reading | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="gpupool-sampler", daemon=True)
        self._thread.start()

    def newest(self) -> Reading:
        """The newest reading; one without any values before the first."""
        return self._newest or Reading()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _sample(self) -> None:
        probe = self._make()  # in the thread: the first call of NVML takes a while
        wait_s = min(0.25, self._every_s)  # something is shown soon
        while not self._closed.wait(wait_s):
            self._newest = probe()
            wait_s = self._every_s
        self._newest = probe()
