"""Which devices there are and which rank gets which. Runs anywhere; loads no torch.

`visible_gpus` asks the driver through NVML; `place` is pure arithmetic on its answer.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from gpupool.core.errors import PlacementError


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU; `used_memory_bytes` is None where hidden."""

    pid: int
    name: str
    user: str
    used_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver describes it now. Unknown readings are None."""

    index: int
    uuid: str
    name: str
    total_memory_bytes: int | None = None
    used_memory_bytes: int | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's place: `device` is "cuda:0" inside an engine that has a GPU, else "cpu"."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    host: str
    device: str
    gpu: Gpu | None
    num_threads: int


class GpuTable(tuple[Gpu, ...]):
    """GPUs that show as a table. `repr` is its text form; a notebook draws it."""

    __slots__ = ()
    HEADER = ("index", "name", "memory", "utilization", "temperature", "held by", "uuid")
    NONE = "No NVIDIA GPU: this machine has no NVIDIA driver, or CUDA_VISIBLE_DEVICES hides them."

    def rows(self) -> list[tuple[str, ...]]:
        """One tuple of texts for each GPU, in the order of `HEADER`; "-" where unknown."""
        return [
            (
                str(gpu.index),
                gpu.name,
                f"{_gib(gpu.used_memory_bytes)} of {_gib(gpu.total_memory_bytes)} GiB",
                _known(gpu.utilization_percent, " %"),
                _known(gpu.temperature_c, " °C"),
                ", ".join(
                    f"{p.name} {p.pid} ({p.user}, {_gib(p.used_memory_bytes)} GiB)"
                    for p in gpu.processes
                )
                or "-",
                gpu.uuid,
            )
            for gpu in self
        ]

    def __repr__(self) -> str:
        if not self:
            return self.NONE
        lines = [self.HEADER, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def gpus() -> GpuTable:
    """The GPUs of this machine that can be used, as a table: memory, load, who holds them."""
    return GpuTable(visible_gpus())


def visible_gpus() -> list[Gpu]:
    """The GPUs this process may use, in the driver's order; empty without an NVIDIA driver.

    `CUDA_VISIBLE_DEVICES` is honoured as CUDA does it, so that a job's allocation is respected.
    """
    gpus = _nvml_gpus()
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if allowed is None else restrict(gpus, allowed)


def restrict(gpus: Sequence[Gpu], visible_devices: str) -> list[Gpu]:
    """`gpus` as CUDA shows them under `CUDA_VISIBLE_DEVICES=visible_devices`.

    CUDA reads entries up to the first unknown one: an index, or the beginning of a UUID.
    """
    chosen: list[Gpu] = []
    for entry in visible_devices.split(","):
        found = _find(gpus, entry.strip())
        if found is None or found in chosen:
            break
        chosen.append(found)
    return chosen


def choose(gpus: Sequence[Gpu], wanted: Sequence[str] | None) -> list[Gpu]:
    """The GPUs named by index or UUID, in the order named; all of them for None.

    Raises:
        PlacementError: a name that is not there, or given twice.
    """
    if wanted is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for name in wanted:
        gpu = _find(gpus, name)
        if gpu is None:
            raise PlacementError(f"GPU {name!r} is not there: {_describe(gpus)}")
        if gpu in chosen:
            raise PlacementError(f"GPU {name!r} is named twice; each rank needs its own.")
        chosen.append(gpu)
    return chosen


def place(gpus: Sequence[Gpu], n: int | None, device: str, num_cores: int) -> list[Rank]:
    """Who gets what on this machine: one GPU per rank, or CPU ranks that share the cores.

    Args:
        gpus: the GPUs to use, at most one per rank.
        n: number of ranks; None takes all GPUs, or 2 CPU ranks where there is none.
        device: "auto", "cpu" or "gpu".
        num_cores: cores to divide among the ranks.

    Raises:
        PlacementError: more ranks than GPUs, or GPUs asked for and none there.
    """
    if device == "gpu" and not gpus:
        raise PlacementError(f"device='gpu': {_describe(gpus)}")
    use_gpus = bool(gpus) and device != "cpu"
    size = n or (len(gpus) if use_gpus else 2)
    if use_gpus and size > len(gpus):
        raise PlacementError(
            f"{size} ranks need {size} GPUs, one each, and {len(gpus)} can be used. Ask for "
            f"n={len(gpus)}, or for CPU ranks with --cpu (device='cpu')."
        )
    threads = max(1, num_cores // size)
    return [
        Rank(
            rank=i,
            world_size=size,
            local_rank=i,
            node_rank=0,
            host=socket.gethostname(),
            device="cuda:0" if use_gpus else "cpu",
            gpu=gpus[i] if use_gpus else None,
            num_threads=threads,
        )
        for i in range(size)
    ]


def num_usable_cores() -> int:
    """Cores this process may run on (its affinity mask, where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _find(gpus: Sequence[Gpu], name: str) -> Gpu | None:
    for gpu in gpus:
        if name == str(gpu.index) or (len(name) > 4 and gpu.uuid.startswith(name)):
            return gpu
    return None


def _describe(gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return (
            "this machine has no NVIDIA GPU that can be used here (no driver, or "
            "CUDA_VISIBLE_DEVICES hides it). `%gpupool start --cpu` starts CPU ranks."
        )
    return "there are " + ", ".join(f"{g.index} ({g.name})" for g in gpus) + "."


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**30:.1f}"


def _known(value: int | None, unit: str) -> str:
    return "-" if value is None else f"{value}{unit}"


def _nvml_gpus() -> list[Gpu]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or no GPU behind it: that is an answer, not a fault
        return []
    try:
        return [_read(pynvml.nvmlDeviceGetHandleByIndex(i), i) for i in range(_count())]
    finally:
        pynvml.nvmlShutdown()


def _count() -> int:
    import pynvml

    return int(pynvml.nvmlDeviceGetCount())


def _read(handle: object, index: int) -> Gpu:
    import pynvml

    def ask(call: str, *args: object) -> object | None:
        try:  # a reading may be missing on this card (MIG, passive cooling); the rest still counts
            return getattr(pynvml, call)(handle, *args)  # type: ignore[no-any-return]
        except pynvml.NVMLError:
            return None

    memory = ask("nvmlDeviceGetMemoryInfo")
    rates = ask("nvmlDeviceGetUtilizationRates")
    temperature = ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
    processes = ask("nvmlDeviceGetComputeRunningProcesses")
    return Gpu(
        index=index,
        uuid=_text(ask("nvmlDeviceGetUUID")),
        name=_text(ask("nvmlDeviceGetName")),
        total_memory_bytes=getattr(memory, "total", None),
        used_memory_bytes=getattr(memory, "used", None),
        utilization_percent=getattr(rates, "gpu", None),
        temperature_c=temperature if isinstance(temperature, int) else None,
        processes=tuple(
            _process(p.pid, p.usedGpuMemory)
            for p in (processes or ())  # type: ignore[attr-defined]
        ),
    )


def _process(pid: int, used: int | None) -> GpuProcess:
    import psutil

    try:
        process = psutil.Process(pid)
        return GpuProcess(pid, process.name(), process.username(), used)
    except psutil.Error:  # gone meanwhile, or in another container
        return GpuProcess(pid, "?", "?", used)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "?")
