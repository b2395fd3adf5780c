"""What the NVIDIA driver says of its GPUs, read through NVML. Runs anywhere; loads no torch.

Only reading; what follows from it is decided in `gpupool/core/machine/topology.py`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import psutil

from gpupool.core.machine.topology import NO_DRIVER, UNREADABLE, Gpu, GpuProcess
from gpupool.core.terminal import plain

_RELEASE_S = 10.0  # the driver takes up to this long to free 80 GB of a killed process
_POLL_S = 0.05
_MPS = "nvidia-cuda-mps"  # the server through which others compute; it does not itself


class Gauges(NamedTuple):
    """What a GPU, or an instance of one, shows now; None where it does not."""

    used_memory_bytes: int | None = None
    total_memory_bytes: int | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None


@functools.cache
def driver() -> Any:
    """NVML, open for as long as this process lives.

    To open it takes up to 3 s a GPU where nothing else keeps the driver awake.

    Raises:
        pynvml.NVMLError: there is no driver, or it fails.
    """
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def read_gpus() -> tuple[list[Gpu], str]:
    """Every GPU that the driver shows this process, in its order, and why there is none, or "".

    In the place of a GPU with MIG mode on stand its instances. One that does not answer is listed
    as unavailable, with the driver's words.
    """
    import pynvml

    try:
        count = driver().nvmlDeviceGetCount()
    except pynvml.NVMLError_LibraryNotFound:
        return [], NO_DRIVER
    except pynvml.NVMLError as error:  # such as a version mismatch after an upgrade
        return [], f"the NVIDIA driver fails ({_words(error)})"
    return [gpu for index in range(count) for gpu in _read_index(index)], ""


def read_gauges(uuid: str) -> Gauges | None:
    """What one GPU, or an instance of one, shows; None if the driver does not know it."""
    handle = _ask("nvmlDeviceGetHandleByUUID", uuid)
    return _gauges(handle) if handle else None


def driver_version() -> str:
    """The driver's own version; "" without one."""
    return _ask("nvmlSystemGetDriverVersion") or ""


def wait_until_released(ended: Mapping[str, int]) -> None:
    """Wait until the driver shows no process that has ended on its GPU any more, or for long.

    The driver frees the memory of a killed process after the process is gone. One that takes its
    place before that runs out of memory.

    Args:
        ended: UUID of a GPU, or of an instance of one -> pid of the process that had it.
    """
    deadline = time.monotonic() + _RELEASE_S
    while time.monotonic() < deadline and any(pid in _pids_on(u) for u, pid in ended.items()):
        time.sleep(_POLL_S)


def _pids_on(uuid: str) -> set[int]:
    """Who computes on a GPU; nobody where that cannot be known."""
    handle = _ask("nvmlDeviceGetHandleByUUID", uuid)
    return {process.pid for process in _processes(handle)} if handle else set()


def _read_index(index: int) -> list[Gpu]:
    """A GPU, or its MIG instances, the indices of which may have gaps.

    What the driver does not report of an instance is taken from its GPU.
    """
    import pynvml

    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        card = _read(handle, index, pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError as error:  # it fell off the bus, or is not this user's
        return [Gpu(index, UNREADABLE, "?", unavailable=_words(error))]
    mode = _ask("nvmlDeviceGetMigMode", handle)  # [current, after the next reset]
    if not mode or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return [card]
    instances = []
    for mig_index in range(_ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = _ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, mig_index)
        uuid = part and _ask("nvmlDeviceGetUUID", part)
        if uuid:
            found = _read(part, index, uuid)
            instance = replace(
                found,
                mig_index=mig_index,
                parent_uuid=card.uuid,
                temperature_c=card.temperature_c,
                compute_capability=found.compute_capability or card.compute_capability,
                unavailable=found.unavailable or card.unavailable,
            )
            instances.append(instance)
    return instances or [replace(card, unavailable="MIG mode is on and has no instance")]


def _read(handle: Any, index: int, uuid: str) -> Gpu:
    capability = _ask("nvmlDeviceGetCudaComputeCapability", handle)
    processes = _processes(handle)
    mode = _ask("nvmlDeviceGetComputeMode", handle)
    unavailable = ""
    if mode == driver().NVML_COMPUTEMODE_PROHIBITED:
        unavailable = "its compute mode is prohibited"
    elif mode == driver().NVML_COMPUTEMODE_EXCLUSIVE_PROCESS and processes:
        holders = ", ".join(map(str, processes))
        unavailable = f"its compute mode is EXCLUSIVE_PROCESS, and {holders} has it"
    return Gpu(
        index=index,
        uuid=uuid,
        name=_ask("nvmlDeviceGetName", handle) or "?",
        processes=processes,
        compute_capability=capability and "{}.{}".format(*capability),
        unavailable=unavailable,
        **_gauges(handle)._asdict(),
    )


def _gauges(handle: Any) -> Gauges:
    memory = _ask("nvmlDeviceGetMemoryInfo", handle)
    rates = _ask("nvmlDeviceGetUtilizationRates", handle)
    return Gauges(
        used_memory_bytes=getattr(memory, "used", None),
        total_memory_bytes=getattr(memory, "total", None),
        utilization_percent=getattr(rates, "gpu", None),
        temperature_c=_ask("nvmlDeviceGetTemperature", handle, driver().NVML_TEMPERATURE_GPU),
    )


def _processes(handle: Any) -> tuple[GpuProcess, ...]:
    """Who has a CUDA context on a GPU; not who only draws."""
    found = []
    for one in _ask("nvmlDeviceGetComputeRunningProcesses", handle) or ():
        try:
            process = psutil.Process(one.pid)
            # a name is what its process says: that of another user's may hold escape codes
            name, user = plain(process.name()), process.username()
        except psutil.Error:  # gone meanwhile, or in another container
            name = user = "?"
        if not name.startswith(_MPS):
            found.append(GpuProcess(one.pid, name, user, one.usedGpuMemory))
    return tuple(found)


def _ask(call: str, *args: Any) -> Any:
    """What NVML answers; None where this card or driver has no answer, and the rest counts."""
    import pynvml

    try:
        return getattr(driver(), call)(*args)
    except pynvml.NVMLError:
        return None


def _words(error: Exception) -> str:
    return str(error).rstrip(".")
