"""Which devices there are and which rank gets which. Pure arithmetic; runs anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpupool.core.errors import PlacementError

NO_DRIVER = "no NVIDIA driver"
UNREADABLE = "?"  # as a UUID: the driver counts this GPU, and says no more of it


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that can compute on a GPU. What cannot be seen of it is "?" or None."""

    pid: int
    name: str
    user: str
    used_memory_bytes: int | None

    def __str__(self) -> str:
        """As in "python 4711 (ada, 5.0 GiB)"."""
        used = self.used_memory_bytes
        shown = "-" if used is None else f"{used / 2**30:.1f}"
        return f"{self.name} {self.pid} ({self.user}, {shown} GiB)"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG instance of a GPU, as the driver describes it now.

    Unknown readings are None. `unavailable` says why it cannot be used ("" if it can). An instance
    has a `mig_index` and the `parent_uuid` of its GPU, in the place of which it stands.
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

    @property
    def label(self) -> str:
        """What it is called: "0", and an instance of it "0:1", as NVIDIA's container tools do."""
        return str(self.index) if self.mig_index is None else f"{self.index}:{self.mig_index}"

    @property
    def card(self) -> str:
        return self.parent_uuid or self.uuid


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's place: `device` is "cuda:0" inside an engine that has a GPU, else "cpu".

    Ranks are numbered host by host: `local_rank` of the `local_world_size` ranks of host number
    `node_rank`. On one host, the notebook's own, `host` (its name), `address` (where the other
    hosts reach it) and `interface` (which has that address) are empty.
    """

    rank: int
    world_size: int
    device: str
    gpu: Gpu | None
    num_threads: int
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    host: str = ""
    address: str = ""
    interface: str = ""


@dataclass(frozen=True, slots=True)
class Discovery:
    """The GPUs that this process may use, in its order, and why it can use none; "" if it can."""

    gpus: tuple[Gpu, ...]
    why_none: str

    @property
    def usable(self) -> list[Gpu]:
        return [gpu for gpu in self.gpus if not gpu.unavailable]


def survey(gpus: Sequence[Gpu], visible_devices: str | None) -> Discovery:
    """What can be used of the GPUs that the driver names, under this CUDA_VISIBLE_DEVICES."""
    visible = gpus if visible_devices is None else restrict(gpus, visible_devices)
    if not all(gpu.unavailable for gpu in visible):
        why_none = ""
    elif visible:
        why_none = ", ".join(f"GPU {gpu.label}: {gpu.unavailable}" for gpu in visible)
    elif gpus:
        why_none = f"CUDA_VISIBLE_DEVICES={visible_devices!r} names no GPU of this machine"
    else:
        why_none = "the NVIDIA driver finds no GPU"
    return Discovery(tuple(visible), why_none)


def restrict(gpus: Sequence[Gpu], visible_devices: str) -> list[Gpu]:
    """`gpus` as CUDA shows them under `CUDA_VISIBLE_DEVICES=visible_devices`.

    CUDA reads entries, indices or UUIDs, up to the first that it does not know. Indices count in
    the driver's order. What a job may not use, as under Slurm, the driver counts and CUDA does not.
    CUDA shows a process one MIG instance only; here all that are named count, as each engine is
    given its own. A GPU with MIG mode on stands for all its instances.
    """
    chosen: list[Gpu] = []
    cards = dict.fromkeys(gpu.card for gpu in gpus if gpu.uuid != UNREADABLE)
    names = {str(index): card for index, card in enumerate(cards)}
    for entry in map(str.strip, visible_devices.split(",")):
        found = [gpu for gpu in gpus if names.get(entry, entry) in {gpu.uuid, gpu.card}]
        if not found:
            break
        chosen += [gpu for gpu in found if gpu not in chosen]
    return chosen


def choose(found: Discovery, wanted: Sequence[str] | None) -> list[Gpu]:
    """The GPUs named, in the order named; all usable ones for None.

    They are named by index ("0"), MIG instance ("0:1") or UUID. A GPU with MIG mode on stands for
    all its instances. A PlacementError if one is not there, cannot be used, or is given twice.
    """
    if wanted is None:
        return found.usable
    chosen: list[Gpu] = []
    for name in wanted:
        gpus = [g for g in found.gpus if name in {g.label, str(g.index), g.uuid, g.card}]
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


def place(gpus: Sequence[Gpu], n: int | None, num_cores: int) -> tuple[Rank, ...]:
    """Who gets what on this machine; without `n` there is a rank for each GPU, or two on CPU.

    Each of the first ranks has a GPU of its own; ranks beyond the GPUs have none, and take no part
    in training. The cores are divided evenly among all ranks, with a GPU or without: loading data
    and launching kernels need them too.
    """
    size = n or len(gpus) or 2
    return tuple(
        Rank(
            rank=i,
            world_size=size,
            device="cuda:0" if i < len(gpus) else "cpu",
            gpu=gpus[i] if i < len(gpus) else None,
            num_threads=max(1, num_cores // size),
            local_rank=i,
            local_world_size=size,
        )
        for i in range(size)
    )
