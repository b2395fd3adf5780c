"""Form and leave the torch process group. Runs on engines.

The store is a file in the pool's private folder, a new one for each generation: no port, no
listener, and no rank whose death takes the store along.
"""

from __future__ import annotations

import datetime
import gc
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# With a GPU each, CPU tensors still go through gloo, as torch does when no backend is named.
_TORCH_BACKEND = {"nccl": "cpu:gloo,cuda:nccl", "gloo": "gloo"}
TIMEOUT = datetime.timedelta(minutes=30)


def form(store_path: str, backend: str, rank: int, world_size: int, device: str = "cuda:0") -> None:
    """Join the group of all ranks; leaves an earlier one first. Returns when all have joined."""
    leave()
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        _TORCH_BACKEND[backend],
        store=dist.FileStore(store_path, world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    dist.barrier()  # connections are made now, not in the user's first collective


def leave() -> None:
    """Leave the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # The traceback of an aborted collective holds the old group in a cycle, sockets and all.
        gc.collect()


@dataclass(frozen=True, slots=True)
class World:
    """This process among the ranks. `World.here()` reads it from the process group."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def here(cls, device: torch.device) -> World:
        """The place in the current process group; alone without one."""
        if not dist.is_initialized():
            return cls(0, 1, device)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def sum(self, numbers: Tensor) -> Tensor:
        """`numbers` summed over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers
