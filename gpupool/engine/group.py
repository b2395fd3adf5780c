"""Form and leave the torch process group. Runs on engines.

The store is a file in the pool's private folder, a new one for each generation: no port, no
listener, and no rank whose death takes the store along.

Where only some ranks train (those that have a GPU), these have a group of their own beside that of
all ranks. It is made and left together with it.

A script of the user's may leave the pool's group and form its own in the same way, with a backend
or timeout of its own (`torchrun.py`).
"""

from __future__ import annotations

import datetime
import gc
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# With a GPU each, CPU tensors still go through gloo, as torch does when no backend is named.
_TORCH_BACKEND = {"nccl": "cpu:gloo,cuda:nccl", "gloo": "gloo"}
TIMEOUT = datetime.timedelta(minutes=30)

_torch_init = dist.init_process_group  # torchrun.py puts another in its place


@dataclass(frozen=True, slots=True)
class Plan:
    """How the pool forms its group on this rank."""

    store_path: str
    backend: str
    rank: int
    world_size: int
    training_ranks: Sequence[int]
    training_backend: str
    device: str


_plan: Plan | None = None
_num_asked = 0  # groups that scripts have formed since the pool did; the same on every rank
_asked: dict[str, Any] = {}  # what the present group was formed with
_group: object = None  # the present group, if it was formed here
_training_group: dist.ProcessGroup | None = None
_left_waiting = threading.Event()  # whoever waits for other ranks is to give up


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
    global _plan, _num_asked
    leave()
    _left_waiting.clear()
    place = (backend, rank, world_size, training_ranks, training_backend, device)
    plan, _plan, _num_asked = Plan(store_path, *place), None, 0
    if rank in training_ranks and training_backend == "nccl":
        torch.cuda.set_device(device)
    store = dist.FileStore(store_path, world_size)  # type: ignore[attr-defined]
    _open(plan, {"backend": _TORCH_BACKEND[backend], "timeout": TIMEOUT}, store)
    # Connections are made now, not in the user's first collective.
    if rank in training_ranks:
        device = "cuda" if training_backend == "nccl" else "cpu"
        dist.all_reduce(torch.zeros(1, device=device), group=_training_group)
    dist.barrier()
    _plan = plan


def plan() -> Plan | None:
    """How the pool formed its group last; None before it has."""
    return _plan


def present() -> Mapping[str, Any] | None:
    """The arguments that the present group was formed with; None without one of ours."""
    return _asked if dist.is_initialized() and dist.group.WORLD is _group else None


def form_as_asked(plan: Plan, asked: Mapping[str, Any]) -> None:
    """Leave the group and form one of all ranks with other arguments of `init_process_group`.

    Raises:
        RuntimeError: another rank has failed, so that it cannot be formed.
    """
    global _num_asked
    __tracebackhide__ = True  # not the user's
    leave()
    _num_asked += 1
    path = f"{plan.store_path}.{_num_asked}"
    store = dist.FileStore(path, plan.world_size)  # type: ignore[attr-defined]
    _wait_for_all(store, plan)
    _open(plan, asked, store)


def form_foreign(asked: Mapping[str, Any]) -> None:
    """Leave the group and form what has a store of its own or is no real group, as torch does."""
    __tracebackhide__ = True
    leave()
    _torch_init(**asked)


def give_up_waiting() -> None:
    """Have `form_as_asked` fail if it waits for other ranks; from any thread."""
    _left_waiting.set()


def is_wanting() -> bool:
    """Whether the pool has to form its group again: it was left, or is not one of all ranks."""
    if _plan is None:
        return False
    return not dist.is_initialized() or dist.get_world_size() != _plan.world_size


def training_group() -> dist.ProcessGroup | None:
    """The group of the ranks that train; None where all do."""
    return _training_group


def leave() -> None:
    """Leave the groups, if there are any."""
    global _training_group, _group
    _training_group = _group = None
    if dist.is_initialized():
        dist.destroy_process_group()
        # The traceback of an aborted collective holds the old group in a cycle, sockets and all.
        gc.collect()


def _open(plan: Plan, asked: Mapping[str, Any], store: Any) -> None:
    global _training_group, _group, _asked
    __tracebackhide__ = True
    hook = sys.excepthook
    _torch_init(**asked, store=store, rank=plan.rank, world_size=plan.world_size)
    sys.excepthook = hook  # torch puts one more "[rank0]:" before every line each time
    _group, _asked = dist.group.WORLD, dict(asked)
    if len(plan.training_ranks) < plan.world_size:
        backend = _TORCH_BACKEND[plan.training_backend]
        made = dist.new_group(list(plan.training_ranks), timeout=TIMEOUT, backend=backend)
        # a rank that is not in it gets a number instead
        _training_group = made if isinstance(made, dist.ProcessGroup) else None


def _wait_for_all(store: Any, plan: Plan) -> None:
    """Wait until every rank has come; unlike torch's own waiting it can be ended."""
    __tracebackhide__ = True
    store.set(f"here{plan.rank}", "")
    everybody = [f"here{rank}" for rank in range(plan.world_size)]
    while not store.check(everybody):
        if _left_waiting.is_set():
            raise RuntimeError("init_process_group: another rank has failed, and does not come.")
        time.sleep(0.005)


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
