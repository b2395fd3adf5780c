"""What this rank's machine gives, measured before anything is trained. Runs on engines.

`%gpupool doctor` asks for it by name: see `gpupool/training/machine.py`.
"""

from __future__ import annotations

import subprocess
import time
from statistics import median
from typing import Any

import torch

from gpupool.core.machine.limits import little_shared_memory, num_usable_cores
from gpupool.data import device as devices
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.threads import in_threads
from gpupool.engine.group.forming import World
from gpupool.engine.process import this_rank

_NUM_BYTES = 64 << 20  # of an all-reduce: as many as the gradients of a middling network
_TRIES = 5
_AT_ONCE = 64
_WITHIN_S = 3.0


def facts() -> dict[str, Any]:
    """Cores, threads and shared memory; of the first rank of a host also how its GPUs are joined,
    as `nvidia-smi topo -m` prints it."""
    here = this_rank()
    return {
        "cores": num_usable_cores(),
        "threads": torch.get_num_threads(),
        "shared_memory": little_shared_memory(),
        "links": _links() if here.local_rank == 0 and here.device != "cpu" else "",
    }


def _links() -> str:
    try:
        asked = ["nvidia-smi", "topo", "-m"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):  # not there, in a container say
        return ""


def exchange_rate() -> float:
    """Bytes a second on the bus of an all-reduce of the ranks that train; 0 of one alone.

    2 (N - 1) / N * bytes / seconds, as NCCL's tests have it: what a link carries, for any N.
    """
    world = World.here(torch.device(this_rank().device))
    if world.size == 1:
        return 0.0
    device, taken = devices.of(world.device), []
    numbers = torch.ones(_NUM_BYTES // 4, device=world.device)
    for _ in range(_TRIES + 1):
        device.synchronize()
        began = time.perf_counter()
        world.sum(numbers.div_(world.size))
        device.synchronize()
        taken.append(time.perf_counter() - began)
    return 2 * (world.size - 1) / world.size * _NUM_BYTES / median(taken[1:])


def store_rate(url: str) -> tuple[int, int, float]:
    """Files and bytes that this rank has read of a folder in about 3 seconds, and the seconds; each
    rank reads files of its own, all at the same time."""
    world, folder = World.here(torch.device(this_rank().device)), Folder(url, {})
    files = folder.list_files()[world.rank :: world.size]
    num_bytes = num_files = 0
    began = time.perf_counter()
    for data in in_threads(folder.read, files, _AT_ONCE):
        num_bytes, num_files = num_bytes + len(data), num_files + 1
        if time.perf_counter() - began > _WITHIN_S:
            break
    return num_files, num_bytes, time.perf_counter() - began
