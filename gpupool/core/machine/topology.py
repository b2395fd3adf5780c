"""Which devices there are and which rank gets which. Pure arithmetic; runs anywhere."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from gpupool.core.errors import PlacementError

NO_DRIVER = "no NVIDIA driver"
HIDDEN = "hidden by CUDA_VISIBLE_DEVICES"
UNREADABLE = "?"  # as a UUID: the driver counts this GPU, and says no more of it


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU; `used_memory_bytes` is None where hidden.

    Name and user are "?" where it cannot be seen, as that of another container. One that only draws
    does not compute.
    """

    pid: int
    name: str
    user: str
    used_memory_bytes: int | None
    computes: bool = True


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG instance of a GPU, as the driver describes it now.

    Unknown readings are None. `unavailable` says why it cannot be used ("" if it can). An instance
    has a `mig_index` and the `parent_uuid` of its GPU. A GPU with MIG mode on, as NVML shows it,
    has `instances` and cannot be used itself.
    """

    index: int
    uuid: str
    name: str
    total_memory_bytes: int | None = None
    used_memory_bytes: int | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    compute_capability: str | None = None
    unavailable: str = ""
    mig_index: int | None = None
    parent_uuid: str = ""
    instances: tuple[Gpu, ...] | None = None
    cpus: tuple[int, ...] = ()  # those of the same NUMA node, in ascending order

    @property
    def label(self) -> str:
        """What it is called: "0", and an instance of it "0:1", as NVIDIA's container tools do."""
        return str(self.index) if self.mig_index is None else f"{self.index}:{self.mig_index}"


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
    cpus: Sequence[int] = ()  # which it runs on; all that this process may use, if there are none


@dataclass(frozen=True, slots=True)
class Discovery:
    """The GPUs of this machine: `gpus` all, `usable` those this process may use, in its order.

    `why_none` says in a few words why none is usable; "" if one is.
    """

    gpus: tuple[Gpu, ...]
    usable: tuple[Gpu, ...]
    why_none: str


def survey(gpus: Sequence[Gpu], trouble: str, visible_devices: str | None) -> Discovery:
    """What can be used of the GPUs that the driver names, and why nothing can.

    Args:
        gpus: as NVML shows them.
        trouble: why NVML shows none, or none can be used; or "".
        visible_devices: the value of CUDA_VISIBLE_DEVICES, None where it is not set.
    """
    devices = split_mig(gpus)
    if trouble:
        devices = [replace(gpu, unavailable=gpu.unavailable or trouble) for gpu in devices]
    visible = devices
    if visible_devices is not None:
        visible = restrict(devices, visible_devices)
    marked = tuple(
        gpu if gpu in visible or gpu.unavailable else replace(gpu, unavailable=HIDDEN)
        for gpu in devices
    )
    usable = tuple(gpu for gpu in visible if not gpu.unavailable)
    if usable:
        why_none = ""
    elif trouble:
        why_none = trouble
    elif not devices:
        why_none = "the NVIDIA driver finds no GPU"
    elif not visible and any(gpu.uuid != UNREADABLE for gpu in devices):
        why_none = f"CUDA_VISIBLE_DEVICES={visible_devices!r} names no GPU of this machine"
    else:
        why_none = ", ".join(f"GPU {gpu.label}: {gpu.unavailable}" for gpu in visible or devices)
    return Discovery(marked, usable, why_none)


def split_mig(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The devices that a process can use: in place of a GPU with MIG mode on, its instances.

    What the driver does not report of an instance is taken from its GPU.
    """
    devices: list[Gpu] = []
    for gpu in gpus:
        if gpu.instances is None:
            devices.append(gpu)
        elif not gpu.instances:
            devices.append(replace(gpu, unavailable="MIG mode is on and has no instance"))
        devices.extend(
            replace(
                instance,
                parent_uuid=gpu.uuid,
                temperature_c=gpu.temperature_c,
                cpus=instance.cpus or gpu.cpus,
                compute_capability=instance.compute_capability or gpu.compute_capability,
                unavailable=instance.unavailable or gpu.unavailable,
            )
            for instance in gpu.instances or ()
        )
    return devices


def restrict(gpus: Sequence[Gpu], visible_devices: str) -> list[Gpu]:
    """`gpus` as CUDA shows them under `CUDA_VISIBLE_DEVICES=visible_devices`.

    CUDA reads entries, indices or UUIDs, up to the first that it does not know. Indices count in
    the driver's order. What a job may not use, as under Slurm, the driver counts and CUDA does not.

    Where CUDA shows a process one MIG instance only, all that are named count here: a job's
    allocation may have several, and each engine is given its own. A GPU with MIG mode on stands for
    all its instances.
    """
    chosen: list[Gpu] = []
    listed = [gpu.parent_uuid or gpu.uuid for gpu in gpus if gpu.uuid != UNREADABLE]
    cards = {str(index): uuid for index, uuid in enumerate(dict.fromkeys(listed))}
    for entry in map(str.strip, visible_devices.split(",")):
        name = cards.get(entry, entry)
        found = [gpu for gpu in gpus if name in {gpu.uuid, gpu.parent_uuid} - {""}]
        if not found:
            break
        chosen += [gpu for gpu in found if gpu not in chosen]
    return chosen


def choose(found: Discovery, wanted: Sequence[str] | None) -> list[Gpu]:
    """The GPUs named, in the order named; all usable ones for None.

    Args:
        wanted: an index ("0"), a MIG instance ("0:1"), or a UUID. A GPU with MIG mode on stands for
            all its instances.

    Raises:
        PlacementError: one is not there, cannot be used, or is given twice.
    """
    if wanted is None:
        return list(found.usable)
    chosen: list[Gpu] = []
    for name in wanted:
        gpus = [
            gpu
            for gpu in found.gpus
            if name in {gpu.label, str(gpu.index), gpu.uuid, gpu.parent_uuid} - {""}
        ]
        if not gpus:
            listed = ", ".join(f"{gpu.label} ({gpu.name})" for gpu in found.gpus)
            there = f"there are {listed}" if listed else found.why_none
            raise PlacementError(
                f"GPU {name!r} is not there: {there}. `%gpupool start --cpu` starts CPU ranks."
            )
        for gpu in gpus:
            if gpu.unavailable:
                raise PlacementError(f"GPU {name!r} cannot be used: {gpu.unavailable}.")
            if gpu in chosen:
                raise PlacementError(f"GPU {name!r} is named twice; each rank needs its own.")
        chosen += gpus
    return chosen


def place(
    gpus: Sequence[Gpu], n: int | None, num_cores: int, cpus: Collection[int] = ()
) -> tuple[Rank, ...]:
    """Who gets what on this machine.

    Each of the first ranks has a GPU of its own; ranks beyond the GPUs have none, and take no part
    in training. Without GPUs all ranks are CPU ranks. The cores are divided evenly among all ranks,
    with a GPU or without: loading data and launching kernels need them too.

    Args:
        gpus: the GPUs to use, at most one per rank.
        n: number of ranks; None: one per GPU, or 2 CPU ranks where there is none.
        num_cores: cores to divide among the ranks; each rank has at least one thread.
        cpus: those that this process may run on; none of them is given to a rank if this is empty.
    """
    size = n or len(gpus) or 2
    num_threads = max(1, num_cores // size)
    near = [_near(gpus[i], cpus) if i < len(gpus) else () for i in range(size)]
    return tuple(
        Rank(
            rank=i,
            world_size=size,
            local_rank=i,
            node_rank=0,
            host=socket.gethostname(),
            device="cuda:0" if i < len(gpus) else "cpu",
            gpu=gpus[i] if i < len(gpus) else None,
            num_threads=num_threads,
            # None where a node has too few for its ranks: half of the machine would do nothing.
            cpus=near[i] if len(near[i]) >= num_threads * near.count(near[i]) else (),
        )
        for i in range(size)
    )


def _near(gpu: Gpu, cpus: Collection[int]) -> tuple[int, ...]:
    """The CPUs of a GPU's own NUMA node; none where all are, or that is not known."""
    near = tuple(cpu for cpu in gpu.cpus if cpu in cpus)
    return near if len(near) < len(cpus) else ()


def training_ranks(ranks: Sequence[Rank]) -> tuple[int, ...]:
    """The ranks that train: those with a GPU of their own, or all where no rank has one."""
    with_gpu = tuple(rank.rank for rank in ranks if rank.gpu is not None)
    return with_gpu or tuple(rank.rank for rank in ranks)


def device_names(ranks: Iterable[Rank]) -> tuple[str, ...]:
    """What each of these ranks computes on: "cuda:0 NVIDIA H200", numbered as on its machine, or
    "CPU"."""
    gpus = [rank.gpu for rank in ranks]
    return tuple(f"cuda:{gpu.label} {gpu.name}" if gpu else "CPU" for gpu in gpus)
