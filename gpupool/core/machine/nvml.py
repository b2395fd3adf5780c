"""What the NVIDIA driver says of its GPUs, read through NVML. Runs anywhere; loads no torch.

Only reading; what follows from it is decided in `gpupool/core/machine/topology.py`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gpupool.core.machine.processes import command_of
from gpupool.core.machine.topology import NO_DRIVER, UNREADABLE, Gpu, GpuProcess
from gpupool.core.machine.uses import computing, holder_text

RELEASE_S = 10.0  # the driver takes up to this long to free 80 GB of a killed process
_POLL_S = 0.05
_ANOTHERS = "this process may not use it, as it belongs to another job, say"

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
        gpus = _read_open(lambda: [_read_index(i) for i in range(pynvml.nvmlDeviceGetCount())])
    except pynvml.NVMLError_LibraryNotFound:
        return [], NO_DRIVER
    except pynvml.NVMLError as error:  # such as a version mismatch after an upgrade
        return [], _failure(error)
    if any(gpu.uuid == UNREADABLE and gpu.unavailable != _ANOTHERS for gpu in gpus):
        close()  # what is open now would not see that it is back
    return gpus, ""


def driver_version() -> tuple[str, int] | None:
    """The driver's own version, and the newest CUDA it serves ("580.65", 13); None without one."""
    import pynvml

    def read() -> tuple[str, int]:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()  # 13020 of 13.2
        return _text(pynvml.nvmlSystemGetDriverVersion()), cuda // 1000

    try:
        return _read_open(read)
    except pynvml.NVMLError:
        return None


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
        return set(_holders(pynvml.nvmlDeviceGetHandleByUUID(uuid)))

    try:
        return _read_open(read)
    except pynvml.NVMLError:
        return set()


def _read_open(read: Callable[[], Read]) -> Read:
    """What `read` returns with NVML open, which it is for as long as this process lives.

    To open it takes up to 3 s a GPU where nothing else keeps the driver awake. What was opened
    before a driver was loaded again, or before a GPU was reset, fails: it is opened once more then.

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


def _why_unreadable(error: Any) -> str:
    """What keeps a GPU from being used that the driver says nothing of."""
    import pynvml

    if isinstance(error, pynvml.NVMLError_NoPermission):
        return _ANOTHERS
    if isinstance(error, pynvml.NVMLError_GpuIsLost):
        return "it has fallen off the bus: `sudo dmesg` says why, and a reboot brings it back"
    if isinstance(error, pynvml.NVMLError_ResetRequired):
        return "it needs a reset: `sudo nvidia-smi --gpu-reset`"
    return str(error).rstrip(".")


def _failure(error: Any) -> str:
    """Why the driver shows no GPU at all, in its words, and what helps where that is known."""
    import pynvml

    advice = {
        pynvml.NVML_ERROR_NO_PERMISSION: ": this user may not open /dev/nvidiactl",
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: ": it was updated, and needs a reboot",
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: ": `sudo modprobe nvidia` loads it or says why not",
    }
    return f"the NVIDIA driver fails ({str(error).rstrip('.')}){advice.get(error.value, '')}"


def _read_index(index: int) -> Gpu:
    import pynvml

    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError as error:  # it fell off the bus, or is not this user's
        return Gpu(index, UNREADABLE, "?", unavailable=_why_unreadable(error))
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
    mode, processes = _ask("nvmlDeviceGetComputeMode", handle), _processes(handle)
    is_exclusive = mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    unavailable = ""
    if mode == pynvml.NVML_COMPUTEMODE_PROHIBITED:
        unavailable = "its compute mode is prohibited"
    elif is_exclusive:
        # of this process `place_ranks` says more
        others = [p for p in computing(processes) if p.pid != os.getpid()]
        if others:
            whose = ", ".join(map(holder_text, others))
            unavailable = f"its compute mode is EXCLUSIVE_PROCESS, and {whose} has it"
    return Gpu(
        index=index,
        uuid=uuid,
        name=_text(_ask("nvmlDeviceGetName", handle)),
        total_memory_bytes=getattr(memory, "total", None),
        used_memory_bytes=getattr(memory, "used", None),
        utilization_percent=getattr(rates, "gpu", None),
        temperature_c=_ask("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU),
        processes=processes,
        compute_capability=capability and "{}.{}".format(*capability),
        unavailable=unavailable,
        mig_index=mig_index,
        instances=instances,
        is_exclusive=is_exclusive,
        cpus=_cpus(handle),
    )


def _cpus(handle: Any) -> tuple[int, ...]:
    """The CPUs that are near to a GPU; none where the driver does not say."""
    num_words = (os.cpu_count() or 1) // 64 + 1
    words = _ask("nvmlDeviceGetCpuAffinity", handle, num_words) or ()
    return tuple(
        64 * n + bit for n, word in enumerate(words) for bit in range(64) if word >> bit & 1
    )


def _processes(handle: Any) -> tuple[GpuProcess, ...]:
    """Who holds memory of it, by pid."""
    found = _holders(handle)
    return tuple(_process(pid, *about) for pid, about in sorted(found.items()))


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
        # `command_of`, as a name is what its process says: another user's may hold escape codes
        return GpuProcess(pid, command_of(pid), psutil.Process(pid).username(), used, computes)
    except psutil.Error:  # gone meanwhile, or in another container
        return GpuProcess(pid, "?", "?", used, computes)


def _ask(call: str, handle: Any, *args: Any) -> Any:
    """What NVML answers; None where this card or driver has no answer, and the rest counts."""
    import pynvml

    try:
        return getattr(pynvml, call)(handle, *args)
    except pynvml.NVMLError:
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "?")
