"""What the NVIDIA driver says of its GPUs, read through NVML. Runs anywhere; loads no torch.

Only reading; what follows from it is decided in `gpupool/core/machine/topology.py`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gpupool.core.machine.topology import NO_DRIVER, Gpu, GpuProcess

RELEASE_S = 10.0  # the driver takes up to this long to free 80 GB of a killed process
_POLL_S = 0.05

Read = TypeVar("Read")
_is_open = False
_opening = threading.RLock()


def read_gpus() -> tuple[list[Gpu], str]:
    """Every GPU that the driver shows this process, in its order, and why there is none, or "".

    A GPU with MIG mode on has its instances in `Gpu.instances`. One that does not answer is listed
    as unavailable, with the driver's words.
    """
    import pynvml

    try:
        return _read_open(lambda: [_read_index(i) for i in range(pynvml.nvmlDeviceGetCount())]), ""
    except pynvml.NVMLError_LibraryNotFound:
        return [], NO_DRIVER
    except pynvml.NVMLError as error:  # such as a version mismatch after an upgrade
        return [], _failure(error)


def wait_until_released(ended: Mapping[str, int], within_s: float = RELEASE_S) -> list[str]:
    """Wait until the driver shows no process that has ended on its GPU any more.

    The driver frees the memory of a killed process after the process is gone. One that takes its
    place before that runs out of memory.

    Args:
        ended: UUID of a GPU, or of an instance of one -> pid of the process that had it.
        within_s: the longest wait.

    Returns:
        The UUIDs of which the memory is not free yet. None without a driver, and of a GPU that does
        not answer: there is nothing to wait for.
    """
    deadline = time.monotonic() + within_s
    held = dict(ended)
    while held := {uuid: pid for uuid, pid in held.items() if pid in _pids_on(uuid)}:
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    return list(held)


def _pids_on(uuid: str) -> set[int]:
    """Who holds memory of a GPU; nobody where that cannot be known."""
    import pynvml

    def read() -> set[int]:
        return set(_memory_by_pid(pynvml.nvmlDeviceGetHandleByUUID(uuid)))

    try:
        return _read_open(read)
    except pynvml.NVMLError:
        return set()


def _read_open(read: Callable[[], Read]) -> Read:
    """What `read` returns with NVML open, which it is for as long as this process lives.

    To open it takes up to 3 s a GPU where nothing else keeps the driver awake. What was opened
    before a driver was loaded anew, or before a GPU was reset, fails: it is opened once more then.

    Raises:
        pynvml.NVMLError: it cannot be opened, or `read` fails on what was just opened.
    """
    import pynvml

    global _is_open
    with _opening:
        was_open = _is_open
        if not was_open:
            pynvml.nvmlInit()
            _is_open = True
        try:
            return read()
        except pynvml.NVMLError:
            close()
            if not was_open:
                raise
        return _read_open(read)


def close() -> None:
    """Close NVML, if it is open; the next reading opens it."""
    import pynvml

    global _is_open
    with _opening, contextlib.suppress(pynvml.NVMLError):
        if _is_open:
            _is_open = False
            pynvml.nvmlShutdown()


def _failure(error: Exception) -> str:
    return f"the NVIDIA driver fails ({str(error).rstrip('.')})"


def _read_index(index: int) -> Gpu:
    import pynvml

    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError as error:  # it fell off the bus, or is not this user's
        return Gpu(index, "?", "?", unavailable=str(error).rstrip("."))
    mode = _ask("nvmlDeviceGetMigMode", handle)  # [current, after the next reset]
    mig = mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    return _read(handle, index, uuid, None, _instances(handle, index) if mig else None)


def _instances(parent: Any, index: int) -> tuple[Gpu, ...]:
    """The MIG instances of a GPU; their indices may have gaps."""
    found = []
    for mig_index in range(_ask("nvmlDeviceGetMaxMigDeviceCount", parent) or 0):
        handle = _ask("nvmlDeviceGetMigDeviceHandleByIndex", parent, mig_index)
        uuid = handle and _ask("nvmlDeviceGetUUID", handle)
        if uuid:
            found.append(_read(handle, index, _text(uuid), mig_index, None))
    return tuple(found)


def _read(
    handle: Any, index: int, uuid: str, mig_index: int | None, instances: tuple[Gpu, ...] | None
) -> Gpu:
    import pynvml

    memory = _ask("nvmlDeviceGetMemoryInfo", handle)
    rates = _ask("nvmlDeviceGetUtilizationRates", handle)
    capability = _ask("nvmlDeviceGetCudaComputeCapability", handle)
    prohibited = _ask("nvmlDeviceGetComputeMode", handle) == pynvml.NVML_COMPUTEMODE_PROHIBITED
    return Gpu(
        index=index,
        uuid=uuid,
        name=_text(_ask("nvmlDeviceGetName", handle)),
        total_memory_bytes=getattr(memory, "total", None),
        used_memory_bytes=getattr(memory, "used", None),
        utilization_percent=getattr(rates, "gpu", None),
        temperature_c=_ask("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU),
        processes=_processes(handle),
        compute_capability=capability and "{}.{}".format(*capability),
        unavailable="its compute mode is prohibited" if prohibited else "",
        mig_index=mig_index,
        instances=instances,
    )


def _processes(handle: Any) -> tuple[GpuProcess, ...]:
    """Who holds memory of it, by pid."""
    used = _memory_by_pid(handle)
    return tuple(_process(pid, num_bytes) for pid, num_bytes in sorted(used.items()))


def _memory_by_pid(handle: Any) -> dict[int, int | None]:
    """Pid -> bytes, of those that compute and those that draw; None where it is hidden."""
    used: dict[int, int | None] = {}
    for kind in ("Graphics", "Compute"):
        for process in _ask(f"nvmlDeviceGet{kind}RunningProcesses", handle) or ():
            used[process.pid] = process.usedGpuMemory
    return used


def _process(pid: int, used: int | None) -> GpuProcess:
    import psutil

    try:
        process = psutil.Process(pid)
        return GpuProcess(pid, process.name(), process.username(), used)
    except psutil.Error:  # gone meanwhile, or in another container
        return GpuProcess(pid, "?", "?", used)


def _ask(call: str, handle: Any, *args: Any) -> Any:
    """What NVML answers; None where this card or driver has no answer, and the rest counts."""
    import pynvml

    try:
        return getattr(pynvml, call)(handle, *args)
    except pynvml.NVMLError:
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "?")
