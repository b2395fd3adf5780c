"""In which order CUDA counts the GPUs of this machine. Runs anywhere; asks CUDA in a short process.

The driver counts them by their place on the bus. So does CUDA where they are equal, or where
CUDA_DEVICE_ORDER is PCI_BUS_ID. Otherwise it puts the fastest one first, by a rule of its own.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from gpupool.core.machine.topology import UNREADABLE, Gpu

_TIMEOUT_S = 30.0  # eight GPUs that sleep take up to 3 s each

# Not here: once initialised, CUDA cannot be used by what this process forks. The names are those of
# the driver API; the prefix of a UUID ("GPU-", "MIG-") is not part of what it gives.
_ASK = """
import ctypes, json, uuid
cuda = ctypes.CDLL("libcuda.so.1")
count, device, found = ctypes.c_int(), ctypes.c_int(), []
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for index in range(count.value):
    name = (ctypes.c_char * 16)()
    assert cuda.cuDeviceGet(ctypes.byref(device), index) == 0
    assert cuda.cuDeviceGetUuid_v2(name, device) == 0
    found.append(str(uuid.UUID(bytes=bytes(name))))
print(json.dumps(found))
"""


def cuda_order(gpus: Sequence[Gpu], visible_devices: str) -> tuple[str, ...]:
    """The UUIDs of these GPUs, or of instances of them, by the index that CUDA has for each.

    Empty where that is the driver's order, or does not matter, and where CUDA does not answer.

    Args:
        gpus: as NVML shows them.
        visible_devices: the value of CUDA_VISIBLE_DEVICES, whose indices are meant.
    """
    names = {gpu.name for gpu in gpus if gpu.uuid != UNREADABLE}
    has_indices = any(entry.strip().isdecimal() for entry in visible_devices.split(","))
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if by_bus or len(names) < 2 or not has_indices:
        return ()
    known = [one.uuid for gpu in gpus for one in (gpu, *(gpu.instances or ()))]
    by_number = {uuid.partition("-")[2]: uuid for uuid in known}
    try:
        order = _ask(tuple(known))
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
    return tuple(by_number[number] for number in order if number in by_number)


@functools.lru_cache(maxsize=8)  # a machine's order does not change while it runs
def _ask(known: tuple[str, ...]) -> list[str]:
    """What CUDA says, of all GPUs that this process may see; `known` is what the answer is for."""
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    asked = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _ASK],
        env=environment,
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    return list(map(str, json.loads(asked.stdout)))
