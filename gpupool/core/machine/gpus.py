"""The GPUs of this machine: what the driver says of them, who uses them, and a table of that.

Asked of NVML, never of torch. Pools lock the GPUs that they use (`locks.py`). Other programs do
not; the driver shows who holds memory. It does not show the processes of another container, and
not what is only about to begin. Which rank gets which is decided in `topology.py`. Runs anywhere.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from gpupool.core.formatting import text_table
from gpupool.core.machine.topology import NO_DRIVER, UNREADABLE, Discovery, Gpu, GpuProcess, survey
from gpupool.core.terminal import plain

_NO_CUDA = re.compile(r"^cuda\b[^=]*= *None", re.MULTILINE)
_UNSEEN_BYTES = 2 * 2**30  # the driver itself has up to 1 GiB, which it counts as used
_RELEASE_S = 10.0  # the driver takes up to this long to free 80 GB of a killed process
_POLL_S = 0.05
_MPS = "nvidia-cuda-mps"  # the server through which others compute; it does not itself


def discover() -> Discovery:
    """Ask the driver which GPUs there are; respects `CUDA_VISIBLE_DEVICES`."""
    gpus, trouble = read_gpus()
    if why_none := trouble or why_torch_cannot():
        return Discovery((), why_none)
    return survey(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def why_torch_cannot() -> str:
    """Why torch, as it is installed, cannot use GPUs, read from a file: to import it takes long."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        file = Path(folder) / "version.py"
        if file.is_file() and _NO_CUDA.search(file.read_text()):
            return "torch is built without CUDA: install one that is built with it"
    return ""


# ---- what the driver says --------------------------------------------------------------------


@functools.cache
def driver() -> Any:
    """NVML, open for as long as this process lives; a `pynvml.NVMLError` if that fails.

    To open it takes up to 3 s a GPU where nothing else keeps the driver awake.
    """
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def read_gpus() -> tuple[list[Gpu], str]:
    """Every GPU in the driver's order, and why there is none, or "".

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


def read_gauges(uuid: str) -> tuple[int | None, ...] | None:
    """Bytes in use, bytes in all, percent of use and °C of one GPU; None where not known."""
    handle = _ask("nvmlDeviceGetHandleByUUID", uuid)
    return tuple(_gauges(handle).values()) if handle else None


def driver_version() -> str:
    return _ask("nvmlSystemGetDriverVersion") or ""


def wait_until_released(ended: Mapping[str, int]) -> None:
    """Wait until the driver shows none of these processes any more, or for long.

    It frees the memory of a killed process after the process is gone. One that takes its place
    before that runs out of memory. `ended`: UUID of a GPU -> pid of the process that had it.
    """

    def is_there(uuid: str, pid: int) -> bool:
        handle = _ask("nvmlDeviceGetHandleByUUID", uuid)
        return bool(handle) and any(one.pid == pid for one in _processes(handle))

    deadline = time.monotonic() + _RELEASE_S
    while time.monotonic() < deadline and any(is_there(*one) for one in ended.items()):
        time.sleep(_POLL_S)


def _read_index(index: int) -> list[Gpu]:
    """A GPU, or its MIG instances: what is not reported of an instance is taken from its GPU."""
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
        if uuid := part and _ask("nvmlDeviceGetUUID", part):
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
        **_gauges(handle),
    )


def _gauges(handle: Any) -> dict[str, Any]:
    memory = _ask("nvmlDeviceGetMemoryInfo", handle)
    return {
        "used_memory_bytes": getattr(memory, "used", None),
        "total_memory_bytes": getattr(memory, "total", None),
        "utilization_percent": getattr(_ask("nvmlDeviceGetUtilizationRates", handle), "gpu", None),
        "temperature_c": _ask("nvmlDeviceGetTemperature", handle, driver().NVML_TEMPERATURE_GPU),
    }


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


# ---- who uses them ---------------------------------------------------------------------------


def other_users(gpu: Gpu) -> list[str]:
    """The other users who compute on a GPU, which is theirs then."""
    return sorted({process.user for process in gpu.processes} - {psutil.Process().username(), "?"})


def use_of(gpu: Gpu, is_ours: bool = False) -> str:
    """Who computes on a GPU beside us (ranks of ours do, if it `is_ours`), in words; else ""."""
    if others := other_users(gpu):
        return f"in use by {', '.join(others)}"
    if is_ours:
        return ""
    known = [process.used_memory_bytes for process in gpu.processes]
    unseen = (gpu.used_memory_bytes or 0) - sum(filter(None, known))
    is_hidden = any(process.user == "?" for process in gpu.processes)
    if is_hidden or (unseen > _UNSEEN_BYTES and None not in known):
        return "in use by a process that cannot be seen from here"
    return "in use by you" if gpu.processes else ""


@dataclass(frozen=True, repr=False)
class GpuTable:
    """GPUs that show as a table. `repr` is its text form; a notebook draws it.

    `selected` maps the UUID of a GPU to the rank of this notebook that has it, such as "rank 0".
    `none` is the sentence that stands for a table without rows.
    """

    gpus: Sequence[Gpu] = ()
    selected: Mapping[str, str] = field(default_factory=dict)
    none: str = "No GPU."

    def __iter__(self) -> Iterator[Gpu]:
        return iter(self.gpus)

    def __len__(self) -> int:
        return len(self.gpus)

    def __getitem__(self, row: int) -> Gpu:
        return self.gpus[row]

    def rows(self) -> list[dict[str, str]]:
        """The texts of each GPU by the names of their columns; "-" where unknown."""
        return [
            {
                "index": gpu.label,
                "name": gpu.name,
                "capability": gpu.compute_capability or "-",
                "memory": f"{_gib(gpu.used_memory_bytes)} of {_gib(gpu.total_memory_bytes)} GiB",
                "utilization": _known(gpu.utilization_percent, " %"),
                "temperature": _known(gpu.temperature_c, " °C"),
                "available": gpu.unavailable or use_of(gpu, gpu.uuid in self.selected) or "yes",
                "selected": self.selected.get(gpu.uuid, "-"),
                "held by": ", ".join(map(str, gpu.processes)) or "-",
                "uuid": gpu.uuid,
            }
            for gpu in self
        ]

    def __repr__(self) -> str:
        if not self:
            return self.none
        rows = self.rows()
        return text_table([tuple(rows[0]), *(tuple(row.values()) for row in rows)])


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**30:.1f}"


def _known(value: int | None, unit: str) -> str:
    return "-" if value is None else f"{value}{unit}"
