"""Form and leave the torch process group. Runs on engines.

The store is a file in the pool's private folder, a new one for each generation: no port, no
listener, and no rank whose death takes the store along.

Where only some ranks train (those that have a GPU), these have a group of their own beside that of
all ranks. It is made and left together with it.
"""

from __future__ import annotations

import datetime
import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# With a GPU each, CPU tensors still go through gloo, as torch does when no backend is named.
_TORCH_BACKEND = {"nccl": "cpu:gloo,cuda:nccl", "gloo": "gloo"}
TIMEOUT = datetime.timedelta(minutes=30)

_training_group: dist.ProcessGroup | None = None


def form(
    store_path: str,
    backend: str,
    rank: int,
    world_size: int,
    training_ranks: Sequence[int],
    training_backend: str,
    device: str = "cuda:0",
) -> None:
    """Join the group of all ranks, and that of the ranks that train if these are fewer.

    Leaves earlier groups first. Returns when all ranks have joined.
    """
    global _training_group
    leave()
    trains = rank in training_ranks
    if trains and training_backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        _TORCH_BACKEND[backend],
        store=dist.FileStore(store_path, world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    if len(training_ranks) < world_size:
        made = dist.new_group(
            list(training_ranks), timeout=TIMEOUT, backend=_TORCH_BACKEND[training_backend]
        )
        # a rank that is not in it gets a number instead
        _training_group = made if isinstance(made, dist.ProcessGroup) else None
    # Connections are made now, not in the user's first collective.
    if trains:
        device = "cuda" if training_backend == "nccl" else "cpu"
        dist.all_reduce(torch.zeros(1, device=device), group=_training_group)
    dist.barrier()


def training_group() -> dist.ProcessGroup | None:
    """The group of the ranks that train; None where all do."""
    return _training_group


def leave() -> None:
    """Leave the groups, if there are any."""
    global _training_group
    _training_group = None
    if dist.is_initialized():
        dist.destroy_process_group()
        # The traceback of an aborted collective holds the old group in a cycle, sockets and all.
        gc.collect()


@dataclass(frozen=True, slots=True)
class World:
    """This process among the ranks that train; `World.here()` reads it from the process group.

    `group` is theirs; None means the default group, or no group at all.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    @classmethod
    def here(cls, device: torch.device) -> World:
        """The place in the current process group; alone without one."""
        if not dist.is_initialized():
            return cls(0, 1, device)
        group = training_group()
        return cls(dist.get_rank(group), dist.get_world_size(group), device, group)

    @property
    def backend(self) -> str:
        """What carries tensors of this device: "nccl" or "gloo"; "none" when alone."""
        if not dist.is_initialized():
            return "none"
        # "cpu:gloo,cuda:nccl"
        pairs = (pair.split(":") for pair in dist.get_backend_config(self.group).split(","))
        return dict(pairs)[self.device.type]

    def sum(self, numbers: Tensor) -> Tensor:
        """`numbers` summed over these ranks, in place."""
        if self.size > 1:
            dist.all_reduce(numbers, group=self.group)
        return numbers
