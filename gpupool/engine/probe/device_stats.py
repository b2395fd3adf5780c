"""How busy, full and warm the device of this rank is. Runs on engines.

Where the driver, or the card, has no answer, a value is None, or what torch knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import psutil
import torch

from gpupool.core.machine import limits
from gpupool.core.machine.gpus import read_gauges
from gpupool.data import device as devices


class Reading(NamedTuple):
    """As in `gpupool.core.wire.events.RankEvent`."""

    utilization: float | None = None
    memory_bytes: int | None = None
    total_memory_bytes: int | None = None
    temperature_c: int | None = None


def make_probe(device: torch.device) -> Callable[[], Reading]:
    """What reads the state of this device: a GPU, or this process on its CPU threads."""
    return _gpu_probe(device) if device.type == "cuda" else _cpu_probe()


def _cpu_probe() -> Callable[[], Reading]:
    """This process: CPU time over wall time times torch's threads, since the last reading."""
    process, at, cpu = psutil.Process(), time.monotonic(), time.process_time()
    # In a container the limit of its cgroup is what ends the process, not the machine's memory.
    of_machine = psutil.virtual_memory().total
    total = min(of_machine, limits.memory_limit() or of_machine)

    def read() -> Reading:
        nonlocal at, cpu
        now, used = time.monotonic(), time.process_time()
        share = (used - cpu) / max(now - at, 1e-3) / torch.get_num_threads()
        at, cpu = now, used
        return Reading(min(1.0, share), process.memory_info().rss, total)

    return read


def _gpu_probe(device: torch.device) -> Callable[[], Reading]:
    """The driver's, of the GPU that torch computes on; torch's own figures if it does not know it.

    torch leaves the kind out of the UUID: "GPU-", or "MIG-" of an instance of one.
    """
    gpu = devices.Cuda(device)
    names = [f"{kind}{gpu.uuid.removeprefix(kind)}" for kind in ("GPU-", "MIG-")]

    def read() -> Reading:
        for name in names:
            if (found := read_gauges(name)) is not None:
                used, total, percent, warm = found
                return Reading(None if percent is None else percent / 100, used, total, warm)
        memory = gpu.memory()
        return Reading(None, memory.reserved, memory.total)

    return read
