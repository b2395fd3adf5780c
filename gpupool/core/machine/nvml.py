"""What the NVIDIA driver says of its GPUs, read through NVML. Runs anywhere; loads no torch.

Only reading; what follows from it is decided in `gpupool/core/machine/topology.py`.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpupool.core.machine.topology import NO_DRIVER, UNREADABLE, Gpu, GpuProcess
from gpupool.core.machine.uses import computing, holder_text
from gpupool.core.terminal import plain

RELEASE_S = 10.0  # the driver takes up to this long to free 80 GB of a killed process
_POLL_S = 0.05


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

    A GPU with MIG mode on has its instances in `Gpu.instances`. One that does not answer is listed
    as unavailable, with the driver's words.
    """
    import pynvml

    try:
        return [_read_index(index) for index in range(driver().nvmlDeviceGetCount())], ""
    except pynvml.NVMLError_LibraryNotFound:
        return [], NO_DRIVER
    except pynvml.NVMLError as error:  # such as a version mismatch after an upgrade
        return [], f"the NVIDIA driver fails ({_words(error)})"


def read_gauges(uuid: str) -> Gauges | None:
    """What one GPU, or an instance of one, shows; None if the driver does not know it."""
    import pynvml

    try:
        return _gauges(driver().nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError:
        return None


def driver_version() -> str:
    """The driver's own version; "" without one."""
    import pynvml

    try:
        return _text(driver().nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""


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

    try:
        return set(_holders(driver().nvmlDeviceGetHandleByUUID(uuid)))
    except pynvml.NVMLError:
        return set()


def _read_index(index: int) -> Gpu:
    import pynvml

    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError as error:  # it fell off the bus, or is not this user's
        return Gpu(index, UNREADABLE, "?", unavailable=_words(error))
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
    capability = _ask("nvmlDeviceGetCudaComputeCapability", handle)
    processes = tuple(_process(pid, *about) for pid, about in sorted(_holders(handle).items()))
    return Gpu(
        index=index,
        uuid=uuid,
        name=_text(_ask("nvmlDeviceGetName", handle)),
        processes=processes,
        compute_capability=capability and "{}.{}".format(*capability),
        unavailable=_why_not(_ask("nvmlDeviceGetComputeMode", handle), processes),
        mig_index=mig_index,
        instances=instances,
        cpus=_cpus(handle),
        **_gauges(handle)._asdict(),
    )


def _why_not(mode: int | None, processes: tuple[GpuProcess, ...]) -> str:
    """Why nobody can begin to compute on a GPU in this compute mode; "" if that is possible."""
    import pynvml

    if mode == pynvml.NVML_COMPUTEMODE_PROHIBITED:
        return "its compute mode is prohibited"
    holders = ", ".join(map(holder_text, computing(processes)))
    if mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS and holders:
        return f"its compute mode is EXCLUSIVE_PROCESS, and {holders} has it"
    return ""


def _gauges(handle: Any) -> Gauges:
    import pynvml

    memory = _ask("nvmlDeviceGetMemoryInfo", handle)
    rates = _ask("nvmlDeviceGetUtilizationRates", handle)
    return Gauges(
        used_memory_bytes=getattr(memory, "used", None),
        total_memory_bytes=getattr(memory, "total", None),
        utilization_percent=getattr(rates, "gpu", None),
        temperature_c=_ask("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU),
    )


def _cpus(handle: Any) -> tuple[int, ...]:
    """The CPUs that are near to a GPU; none where the driver does not say."""
    num_words = (os.cpu_count() or 1) // 64 + 1
    words = _ask("nvmlDeviceGetCpuAffinity", handle, num_words) or ()
    return tuple(
        64 * n + bit for n, word in enumerate(words) for bit in range(64) if word >> bit & 1
    )


def _holders(handle: Any) -> dict[int, tuple[int | None, bool]]:
    """Pid -> bytes, None where they are hidden, and whether it computes or only draws."""
    found: dict[int, tuple[int | None, bool]] = {}
    for kind in ("Graphics", "Compute"):
        for process in _ask(f"nvmlDeviceGet{kind}RunningProcesses", handle) or ():
            # A desktop may be in both lists, and has the GPU for its screen all the same.
            computes = kind == "Compute" and process.pid not in found
            found[process.pid] = process.usedGpuMemory, computes
    return found


def _process(pid: int, used: int | None, computes: bool) -> GpuProcess:
    import psutil

    try:
        process = psutil.Process(pid)
        # a name is what its process says: that of another user's may hold escape codes
        return GpuProcess(pid, plain(process.name()), process.username(), used, computes)
    except psutil.Error:  # gone meanwhile, or in another container
        return GpuProcess(pid, "?", "?", used, computes)


def _ask(call: str, handle: Any, *args: Any) -> Any:
    """What NVML answers; None where this card or driver has no answer, and the rest counts."""
    import pynvml

    try:
        return getattr(pynvml, call)(handle, *args)
    except pynvml.NVMLError:
        return None


def _words(error: Exception) -> str:
    return str(error).rstrip(".")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "?")
