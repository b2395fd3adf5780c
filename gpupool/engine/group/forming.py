"""Form and leave the torch process group. Runs on engines.

The store is a file in the pool's private folder: no port, no listener, and no rank whose death
takes the store along. All ranks `join`, and when all have, they `connect`: nobody leaves a
generation before all have formed it.

The group is destroyed and another one formed, with a store of its own. DDP models over all ranks go
on with the new one (`ddp_replicas.py`). What else holds a group of an earlier generation, a
sub-group say, is cut off: to use it is an error that says so, and never a hang.

Where only some ranks train (those that have a GPU), these have a group of their own beside that of
all ranks. It is made and left together with it.

A script of the user's may leave the pool's group and form its own in the same way, with a backend
or timeout of its own (`engine/cells/torchrun.py`). For the sub-groups of cells ranks wait in
Python, and look who has connected, as they do for the group itself (`install`, `splitting`).

Names of torch that are private are each guarded by a test in `tests/engine/group/test_facts.py`.
"""

from __future__ import annotations

import datetime
import functools
import gc
import inspect
import logging
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from gpupool.core.machine.topology import Rank
from gpupool.core.wire.calls import GroupPlan
from gpupool.data import device as devices
from gpupool.engine.group import ddp_replicas, location, rendezvous
from gpupool.engine.group.abort import ABORT_S, abort_collectives, finish_aborts, was_aborted
from gpupool.engine.group.gloo_sockets import gloo_connections, refuse_strangers

# With a GPU each, CPU tensors still go through gloo, as torch does when no backend is named.
_TORCH_BACKEND = {"nccl": "cpu:gloo,cuda:nccl", "gloo": "gloo"}
# What is said by a group whose connections are shut, by torch of one that it has destroyed, and by
# NCCL's two implementations of one whose communicator was aborted or finalized.
_OF_LEFT = (
    "closed by peer", "connection reset", "not registered", "world group map",
    "communicator was aborted", "failed to get async error",
    "processgroupnccl not initialized", "processgroupnccl has been finalized",
    "processgroupnccl already finalized",
)  # fmt: skip
EARLIER = (
    "this process group is of an earlier generation of the pool, and was cut off with it. Make "
    "what holds it again: sub-groups, a DeviceMesh, FSDP models; DDP models too, if they are "
    "over some of the ranks or had parameters frozen since they were made."
)
_TIMEOUT = datetime.timedelta(minutes=30)
_CONNECT_TIMEOUT = datetime.timedelta(seconds=20)  # for what takes milliseconds if all are there
_LATE = "TORCH_GLOO_LAZY_INIT"  # has gloo connect when it first sends, after everybody has looked

_c10d: Any = distributed_c10d  # whose private names are not annotated
_torch_init = dist.init_process_group  # torchrun.py puts another in its place


@dataclass(frozen=True)
class Plan(GroupPlan):
    """How the pool forms its group on this rank."""

    rank: int
    world_size: int
    device: str

    @classmethod
    def of(cls, plan: GroupPlan, rank: Rank) -> Plan:
        """The plan for this rank."""
        return cls(**vars(plan), rank=rank.rank, world_size=rank.world_size, device=rank.device)


_plan: Plan | None = None
_num_asked = 0  # groups that scripts have formed since then; the same on every rank
_asked: dict[str, Any] = {}  # what the present group was formed with
_group: object = None  # the present group, if it was formed here
_training_group: dist.ProcessGroup | None = None
_num_made: Counter[str] = Counter()  # sub-groups of the present group, by name
_connections: frozenset[str] = frozenset()  # of the present generation
_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # of before too, if still held


def join() -> None:
    """Get ready to form the group."""
    while not finish_aborts():  # else the pool ends this rank: pool/upkeep/forming.py
        pass
    rendezvous.begin_waiting()


def connect(plan: Plan) -> None:
    """Form the group that all ranks have joined, in the place of the one before. Returns when all
    have.

    Raises:
        RuntimeError: another rank does not come, or another user has connected.
    """
    global _plan, _num_asked, _connections
    _plan, _num_asked = None, 0
    if dist.is_initialized():
        abort_collectives()  # what still waits in it gets an error
    leave()
    devices.of(plan.device).make_current()
    store = dist.FileStore(plan.store_path, plan.world_size)  # type: ignore[attr-defined]
    rendezvous.exchange(store, "connect", plan.rank, plan.world_size)
    sees = _open(plan, {"backend": _TORCH_BACKEND[plan.backend], "timeout": _TIMEOUT}, store)
    if not sees and plan.world_size > 1:
        logging.getLogger("gpupool").warning(
            "/proc does not show the connections of gloo: nobody can see who is at their other "
            "ends, nor free a rank from a collective on gloo."
        )
    _connections = frozenset(gloo_connections().values())
    # What there is to be set up is set up now, not in the user's first collective.
    if plan.rank in plan.training_ranks:
        device = plan.device if plan.training_backend == "nccl" else "cpu"
        number = torch.zeros(1, device=device, dtype=torch.uint8)  # a cell may set torch's default
        dist.all_reduce(number, group=_training_group)
    dist.barrier()
    if _is_one_left():  # so it is on all ranks that have a model over it
        ddp_replicas.renew_all()
    _plan = plan
    location.forget_before()


def is_ours() -> bool:
    """Whether the present group of all ranks is one that was formed here."""
    return dist.is_initialized() and dist.group.WORLD is _group


def plan() -> Plan | None:
    """How the pool formed its group last; None before it has."""
    return _plan


def present() -> Mapping[str, Any] | None:
    """The arguments that the present group was formed with; None without one of ours."""
    return _asked if is_ours() else None


def form_as_asked(plan: Plan, asked: Mapping[str, Any]) -> None:
    """Leave the group and form one of all ranks with other arguments of `init_process_group`.

    Without a back end it has the pool's: torch would choose one by what each rank sees, and a rank
    with a GPU and one without would wait for each other.

    Raises:
        RuntimeError: another rank has failed, so that it cannot be formed.
        ValueError: it asks for NCCL, and some ranks have no GPU. All ranks raise it.
    """
    global _num_asked
    __tracebackhide__ = True  # not the user's
    leave()
    _num_asked += 1
    path = f"{plan.store_path}.{_num_asked}"
    store = dist.FileStore(path, plan.world_size)  # type: ignore[attr-defined]
    found = rendezvous.exchange(store, "here", plan.rank, plan.world_size, plan.device)
    asked = {"backend": _TORCH_BACKEND[plan.backend], **asked}
    _refuse_without_gpu("init_process_group", asked["backend"], dict(enumerate(found)))
    _open(plan, asked, store)


def form_foreign(asked: Mapping[str, Any]) -> None:
    """Leave the group and form what has a store of its own or is no real group, as torch does."""
    __tracebackhide__ = True
    leave()
    _torch_init(**asked)
    refuse_strangers()


def is_wanting() -> bool:
    """Whether the pool has to form its group again: it was left, or is not one of all ranks."""
    if _plan is None:
        return False
    return not dist.is_initialized() or dist.get_world_size() != _plan.world_size


def counts() -> dict[str, int]:
    """Group -> how many of its collectives this rank has begun; and how many groups.

    These are named by their number: ranks that differ in it would not meet in the next one.
    """
    world = _c10d._world
    groups = list(world.pg_names.items())
    begun = {name: one._get_sequence_number_for_group() for one, name in groups}
    made = {f"made {name}": number for name, number in list(_num_made.items())}
    return {"made": int(world.group_count), **made, **begun}


def is_of_earlier(message: str, frames: Sequence[FrameType]) -> bool:
    """Whether a collective that failed was one of a group that was left, and the present one is
    whole. What was called with a present group is none."""
    if not _is_one_left() or not any(words in message.lower() for words in _OF_LEFT):
        return False
    present = _c10d._world.pg_map
    calls = [frame for frame in frames if frame.f_code.co_filename == _c10d.__file__]
    values = [value for frame in calls for value in frame.f_locals.values()]
    if any(isinstance(value, dist.ProcessGroup) and value in present for value in values):
        return False
    is_whole = _connections <= {*gloo_connections().values()}
    return is_whole and not was_aborted(dist.group.WORLD)


def training_group() -> dist.ProcessGroup | None:
    """The group of the ranks that train; None where all do."""
    return _training_group


def leave() -> None:
    """Leave the groups, if there are any.

    Raises:
        RuntimeError: they are being aborted, and that does not end.
    """
    global _training_group, _group
    require_aborted()
    _training_group = _group = None
    _num_made.clear()
    if dist.is_initialized():
        _groups.update(_c10d._world.pg_map)
        dist.destroy_process_group()
        # The traceback of an aborted collective holds the old group in a cycle, sockets and all.
        gc.collect()


def _is_one_left() -> bool:
    """Whether a group that was left is still held, mostly by the user."""
    return any(group not in _c10d._world.pg_map for group in _groups)


def require_aborted() -> None:
    """Wait until no group is being aborted: a communicator is freed twice else.

    Raises:
        RuntimeError: that does not end.
    """
    __tracebackhide__ = True
    if not finish_aborts():
        raise RuntimeError(
            f"the process group of this rank is being aborted, and that did not end within "
            f"{ABORT_S:.0f} s: a kernel still runs on its GPU."
        )


def _bound(plan: Plan, backend: Any) -> dict[str, Any]:
    """The device that a group on NCCL is bound to: torch would take the one of LOCAL_RANK.

    That is another one in a notebook that sees several. An older torch takes that of the tensors;
    there, a group that is bound has ranks wait for ever that are not in a sub-group on gloo: who is
    not in one splits NCCL's communicator for it, and waits there for its members.
    """
    trains = plan.rank in plan.training_ranks
    splits = "requested_backend" in inspect.signature(_c10d._get_split_source).parameters
    if _has_nccl(backend) and trains and plan.device != "cpu" and (plan.world_size == 1 or splits):
        return {"device_id": torch.device(plan.device)}
    return {}


def _open(plan: Plan, asked: Mapping[str, Any], store: Any) -> bool:
    """Form the group of all ranks; returns whether it is seen who has connected."""
    global _training_group, _group, _asked
    __tracebackhide__ = True
    asked = {**_bound(plan, asked["backend"]), **asked}
    rendezvous.use_store(store)
    os.environ.pop(_LATE, None)
    hook = sys.excepthook
    is_gloo = _is_gloo_alone(asked["backend"])
    options = {**asked, "timeout": _CONNECT_TIMEOUT} if is_gloo else asked
    _torch_init(**options, store=store, rank=plan.rank, world_size=plan.world_size)
    sys.excepthook = hook  # torch puts one more "[rank0]:" before every line each time
    if is_gloo:
        _set_timeout(dist.group.WORLD, asked.get("timeout", _TIMEOUT))
    sees = refuse_strangers()
    world: Any = dist.group.WORLD
    _group, _asked = world, dict(asked)
    _groups.add(world)
    if len(plan.training_ranks) < plan.world_size:
        backend = _TORCH_BACKEND[plan.training_backend]
        bound = _bound(plan, backend)
        made = dist.new_group(list(plan.training_ranks), _TIMEOUT, backend, **bound)
        # a rank that is not in it gets a number instead
        _training_group = made if isinstance(made, dist.ProcessGroup) else None
    return sees


# ---- sub-groups ------------------------------------------------------------------------------


def install() -> None:
    """Have ranks wait in Python for the sub-groups of the pool's group, and look who connects."""
    make = _c10d._new_process_group_helper

    @functools.wraps(make)
    def making(
        size: int, place: int | None, ranks: list[int], backend: Any, store: Any, name: str,
        *args: Any, **options: Any,
    ) -> Any:  # fmt: skip
        __tracebackhide__ = True
        if not ranks:  # the group of all ranks, which is waited for and looked at elsewhere
            return make(size, place, ranks, backend, store, name, *args, **options)
        os.environ.pop(_LATE, None)
        if is_ours():
            is_gloo = _is_gloo_alone(backend)
            if not is_gloo and name.isdecimal():
                # NCCL splits the communicator of all ranks: who waits in torch for one that does
                # not come cannot be freed. (A name in hexadecimal: its members alone form it.)
                world: Any = dist.group.WORLD
                own = "cuda" if devices.has_gpu() else "cpu"
                key = f"gpupool/all/{name}"
                found = rendezvous.exchange(store, key, world.rank(), world.size(), own)
                _refuse_without_gpu("new_group", backend, {rank: found[rank] for rank in ranks})
            if place is not None:
                rendezvous.exchange(store, f"gpupool/{name}/{_number_made(name)}", place, size)
        made = make(size, place, ranks, backend, store, name, *args, **options)
        refuse_strangers()
        return made

    _c10d._new_process_group_helper = making


def splitting(split: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.distributed.split_group`, for which ranks wait and look as for other sub-groups."""

    @functools.wraps(split)
    def split_group(parent_pg: Any = None, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        parent: Any = parent_pg or dist.group.WORLD
        if is_ours() and parent in _c10d._world.pg_map:
            store = _c10d._world.pg_map[parent][1]
            key = f"gpupool/split/{_number_made('split')}"
            rendezvous.exchange(store, key, parent.rank(), parent.size())
        group = split(parent_pg, *args, **options)
        refuse_strangers()
        return group

    return split_group


def _number_made(name: str) -> int:
    """How many sub-groups of this name were begun of the present group, with one that is now."""
    _num_made[name] += 1
    return _num_made[name]


# ---- back ends -------------------------------------------------------------------------------


def _is_gloo_alone(backend: Any) -> bool:
    """Whether gloo carries all that a group of this backend does."""
    return str(backend) in ("gloo", "cpu:gloo")


def _has_nccl(backend: Any) -> bool:
    """Whether a group of this backend carries the tensors of some device by NCCL."""
    return "nccl" in str(backend).lower()


def _set_timeout(group: Any, timeout: datetime.timedelta) -> None:
    """Have collectives of a group wait for so long from now on."""
    if hasattr(group, "set_timeout"):  # since torch 2.14
        group.set_timeout(timeout)
    else:
        _c10d._set_pg_timeout(timeout, group)


def _refuse_without_gpu(function: str, backend: Any, found: Mapping[int, str]) -> None:
    """Raise a ValueError, on all ranks alike, if NCCL is asked for and a member has no GPU.

    Those that have one would wait inside torch for the others, which torch refuses there.

    Args:
        found: rank -> its device.
    """
    __tracebackhide__ = True
    lacking = [str(rank) for rank, device in found.items() if device == "cpu"]
    if lacking and _has_nccl(backend):
        raise ValueError(
            f"{function}: {str(backend)!r} needs a GPU for every rank that takes part; rank "
            f"{', '.join(lacking)} has none. Without a back end it takes one that all ranks have."
        )


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

    def gather(self, value: Any) -> list[Any]:
        """The value of each of these ranks, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def sum_later(self, numbers: Tensor) -> Callable[[], list[float]]:
        """Begin to sum `numbers`, of one dimension, over these ranks, and do not wait.

        What is returned waits until that is done, though not for what the device does after it, and
        gives the sums.
        """
        work = dist.all_reduce(numbers, group=self.group, async_op=True) if self.size > 1 else None
        device = devices.of(numbers.device)
        if not device.lags:
            return lambda: (work and work.wait(), numbers.tolist())[1]
        if work is not None:
            work.wait()  # the stream does, and not this thread
        copy, copied = device.copy_to_host(numbers)

        def sums() -> list[float]:
            copied.synchronize()
            return copy.tolist()

        return sums

    def sum(self, numbers: Tensor) -> Tensor:
        """`numbers` summed over these ranks, in place."""
        if self.size > 1:
            dist.all_reduce(numbers, group=self.group)
        return numbers
