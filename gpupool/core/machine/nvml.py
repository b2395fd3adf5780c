"""What the NVIDIA driver says of its GPUs, read through NVML. Runs anywhere; loads no torch.

Only reading; what follows from it is decided in `gpupool/core/machine/topology.py`.
"""

from __future__ import annotations

from typing import Any

from gpupool.core.machine.topology import NO_DRIVER, Gpu, GpuProcess


def read_gpus() -> tuple[list[Gpu], str]:
    """Every GPU that the driver shows this process, in its order, and why there is none, or "".

    A GPU with MIG mode on has its instances in `Gpu.instances`. One that does not answer is listed
    as unavailable, with the driver's words.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return [], NO_DRIVER
    except pynvml.NVMLError as error:  # such as a version mismatch after an upgrade
        return [], _failure(error)
    try:
        return [_read_index(i) for i in range(pynvml.nvmlDeviceGetCount())], ""
    except pynvml.NVMLError as error:
        return [], _failure(error)
    finally:
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
    """Who holds memory of it, by pid: those that compute and those that draw."""
    used: dict[int, int | None] = {}
    for kind in ("Graphics", "Compute"):
        for process in _ask(f"nvmlDeviceGet{kind}RunningProcesses", handle) or ():
            used[process.pid] = process.usedGpuMemory
    return tuple(_process(pid, num_bytes) for pid, num_bytes in sorted(used.items()))


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
