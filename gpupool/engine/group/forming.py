"""Form and leave the torch process group. Runs on engines.

The store is a file in the pool's private folder: no port, no listener, and no rank whose death
takes the store along. Of several hosts it is a server in the process of rank 0, at its own address,
another one for each generation: without rank 0 no group is formed anyway.

All ranks `join`, and when all have, they `connect`: nobody leaves a generation before all have
formed it. They wait for each other in Python, where the wait can be ended; what torch itself waits
for, it waits for in the store, which `give_up_waiting` ends. DDP models over all ranks go on with
the new group. What else holds one of an earlier generation, a sub-group say, is cut off: to use it
is an error, and never a hang.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from gpupool.engine.group import ddp_replicas, gloo_sockets, location
from gpupool.engine.group.abort import abort_collectives, finish_aborts
from gpupool.engine.process import this_rank

# With a GPU each, CPU tensors still go through gloo, as torch does when no backend is named.
_TORCH_BACKEND = {"nccl": "cpu:gloo,cuda:nccl", "gloo": "gloo"}
EARLIER = (
    "this process group is of an earlier generation of the pool, and was cut off with it. Make "
    "what holds it again: sub-groups, a DeviceMesh, FSDP models."
)
_NOT_COMING = "init_process_group: another rank has failed, and does not come."
_TIMEOUT = datetime.timedelta(minutes=30)
_CONNECT_TIMEOUT = datetime.timedelta(seconds=20)  # for what takes milliseconds if all are there
_STORE_TIMEOUT = datetime.timedelta(minutes=5)  # what a FileStore has
_POLL_S = 0.001

_c10d: Any = distributed_c10d  # whose private names are not annotated
_torch_init = dist.init_process_group  # torchrun.py puts another in its place

_plan: GroupPlan | None = None  # how the pool formed its group last
_num_asked = 0  # groups that scripts have formed since then; the same on every rank
_store: Any = None  # of the present group
_server: Any = None  # the connection to it, of several hosts; on rank 0 the server, too
_training: dict[int, dist.ProcessGroup] = {}  # of the first so many ranks that train
_num_training = 0  # of them that train now; 0: all ranks
_formed: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # of all ranks, if still held
is_hidden = False
_give_up = threading.Event()  # whoever waits for other ranks is to stop waiting


def join() -> str:
    """Get ready to form the group; of several hosts, rank 0 says where the store is."""
    global _server
    finish_aborts()  # else the pool ends this rank: pool/upkeep/forming.py
    _give_up.clear()
    here = this_rank()
    if here.rank > 0 or here.num_nodes == 1:
        return ""
    # Told a port only, it would listen at all addresses.
    listener = socket.create_server((here.address, 0))
    address, port = listener.getsockname()
    _server = _meet(f"{address}:{port}", is_master=True, master_listen_fd=listener.detach())
    return f"{address}:{port}"


def connect(plan: GroupPlan, here: Rank) -> None:
    """Form the group that all ranks have joined, in the place of the one before.

    Raises:
        RuntimeError: another rank does not come, or a stranger has connected.
    """
    global _plan, _num_asked
    _plan, _num_asked = plan, 0
    if dist.is_initialized():
        abort_collectives()  # what still waits in it gets an error
    devices.of(here.device).make_current()
    _form(plan, here, {})
    if plan.backend == "nccl":
        # What there is to be set up is set up now, not in the user's first collective.
        dist.all_reduce(torch.zeros(1, device=here.device))
    dist.barrier()
    if len(_formed) > 1:  # so it is on all ranks that have a model over one that was left
        ddp_replicas.renew_all()
    location.forget_before()


def form_as_asked(asked: Mapping[str, Any], here: Rank) -> None:
    """Have a group with these arguments of `init_process_group`: the present one, if it will do.

    Without a back end it has the pool's: torch would choose one by what each rank sees, and a rank
    with a GPU and one without would wait for each other.
    """
    global _num_asked
    __tracebackhide__ = True  # not the user's
    assert _plan is not None
    is_whole = dist.is_initialized() and dist.group.WORLD in _formed  # no stranger was in it
    is_usual = asked.keys() <= {"backend", "timeout"}
    if is_whole and is_usual and asked.get("backend", "").lower() in dist.get_backend_config():
        if "timeout" in asked:
            _set_timeout(asked["timeout"])
        return
    _num_asked += 1
    _form(_plan, here, asked)


def _meet(address: str, **listener: Any) -> Any:
    host, _, port = address.rpartition(":")
    options = {"timeout": _CONNECT_TIMEOUT, "wait_for_workers": False, **listener}
    server = dist.TCPStore(host, int(port), **options)  # type: ignore[attr-defined]
    server.set_timeout(_STORE_TIMEOUT)
    return server


def _form(plan: GroupPlan, here: Rank, asked: Mapping[str, Any]) -> None:
    global _server, _store
    __tracebackhide__ = True
    leave()
    name = plan.store if _num_asked == 0 else f"{plan.store}.{_num_asked}"
    if not plan.key:
        _store = dist.FileStore(name, here.world_size)  # type: ignore[attr-defined]
    else:
        if _num_asked == 0 and here.rank > 0:
            _server = _meet(plan.store)
        _store = dist.PrefixStore(name, _server)  # type: ignore[attr-defined]
    backend = str(asked.get("backend", plan.backend)).lower()
    place = {"store": _store, "rank": here.rank, "world_size": here.world_size}
    options = {**asked, **place, "backend": _TORCH_BACKEND.get(backend, backend)}
    _torch_init(**{**options, "timeout": _CONNECT_TIMEOUT})
    # Here: what fails within torch's function would never be left.
    refuse_strangers(_store, "", here.rank, here.world_size)
    _set_timeout(asked.get("timeout", _TIMEOUT))
    _formed.add(_c10d._get_default_group())


def _set_timeout(timeout: datetime.timedelta) -> None:
    world = _c10d._get_default_group()
    if hasattr(world, "set_timeout"):  # since torch 2.14
        world.set_timeout(timeout)
    else:
        _c10d._set_pg_timeout(timeout)


def leave() -> None:
    finish_aborts()
    _training.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
        # The traceback of an aborted collective holds the old group in a cycle, sockets and all.
        gc.collect()
    _c10d._world.group_count = 0  # a forming that has failed has counted one; it names the next


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """A block in which this process has no group, for torch and for us."""
    global is_hidden
    kept, _c10d._world.default_pg, is_hidden = _c10d._world.default_pg, None, True
    try:
        yield
    finally:
        _c10d._world.default_pg, is_hidden = kept, False


def counts() -> dict[str, int]:
    """Group -> how many of its collectives this rank has begun; and how many groups.

    These are named by their number: ranks that differ in it would not meet in the next one.
    """
    groups = list(_c10d._world.pg_names.items())
    begun = {name: group._get_sequence_number_for_group() for group, name in groups}
    return {"made": int(_c10d._world.group_count), **begun}


def is_of_earlier(frames: Sequence[FrameType]) -> bool:
    """Whether a collective, with these frames, was called with a group that was left."""
    calls = [frame.f_locals for frame in frames if frame.f_code.co_filename == _c10d.__file__]
    groups = [call["group"] for call in calls if isinstance(call.get("group"), dist.ProcessGroup)]
    return any(group not in _c10d._world.pg_map for group in groups)


def training_group() -> dist.ProcessGroup | None:
    """The group of the ranks that train now; None where all do, or it was left."""
    return _training.get(_num_training)


def _join_training(num_ranks: int) -> None:
    """Train from now on with the first so many ranks that can (those with a GPU, if not all have
    one): they call this together, and make a group of their own when they first do."""
    global _num_training
    ranks = list(_plan.training_ranks)[: num_ranks or None] if _plan is not None else []
    _num_training = len(ranks) if len(ranks) < dist.get_world_size() else 0
    if _plan is None or _num_training in (0, *_training):
        return
    world, backend = _c10d._world, _TORCH_BACKEND[_plan.training_backend]
    # The others are not asked: they count no group, of which their number names the next one.
    num_made, world.group_count = world.group_count, -1
    made = dist.new_group(ranks, _TIMEOUT, backend, use_local_synchronization=True)
    world.group_count = num_made
    assert isinstance(made, dist.ProcessGroup)
    _training[_num_training] = made


def install() -> None:
    """Have ranks wait in Python for each group that is made, and look who has connected."""
    make = _c10d._new_process_group_helper

    @functools.wraps(make)
    def making(size: int, place: int | None, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        ranks, _, store, name, *_ = args
        if place is None:  # no member
            return make(size, place, *args, **options)
        _wait_for_all(store, f"gpupool/{name}", place, size, "")
        made = make(size, place, *args, **options)
        if ranks:  # not the group of all ranks
            refuse_strangers(store, name, place, size)
        return made

    _c10d._new_process_group_helper = making


def refuse_strangers(store: Any, name: str, place: int, size: int) -> None:
    """Shut out who has connected to a group, which is complete now, and is no member of it: an
    error names his address. `place` is this rank's in the group."""
    __tracebackhide__ = True
    key = _plan.key if _plan is not None else ""
    said = gloo_sockets.claim(key)
    keys = _wait_for_all(store, f"gpupool/{name}/ends", place, size, said)
    others = [store.get(one).decode(errors="replace") for one in keys]
    gloo_sockets.refuse_unclaimed(key, others)


def _wait_for_all(store: Any, key: str, place: int, size: int, value: str) -> list[str]:
    """Set a value, and return the keys of all members' when they have set theirs; a RuntimeError if
    `give_up_waiting` was called, or the store is gone."""
    __tracebackhide__ = True
    keys = [f"{key}/{other}" for other in range(size)]
    try:
        store.set(keys[place], value)
        while not store.check(keys):
            if _give_up.is_set():
                raise RuntimeError(_NOT_COMING)
            time.sleep(_POLL_S if _server is None else 5 * _POLL_S)  # all ask one
    except dist.DistNetworkError:  # rank 0, and the store with it
        raise RuntimeError(_NOT_COMING) from None
    return keys


def give_up_waiting() -> None:
    """Have this rank wait no longer for others that do not come; from any thread."""
    _give_up.set()
    if _plan is not None and _plan.key:
        gloo_sockets.shut_connections_to(_plan.store)
    elif _store is not None:
        _store.set_timeout(datetime.timedelta(seconds=_POLL_S))  # a FileStore looks again


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
    def here(cls, device: torch.device, num_ranks: int = 0) -> World:
        """The place in the current process group; alone without one.

        `num_ranks`: in that of the first ranks that train, of which this is one; 0: of all.
        """
        if not dist.is_initialized():
            return cls(0, 1, device)
        _join_training(num_ranks)
        group = training_group()
        return cls(dist.get_rank(group), dist.get_world_size(group), device, group)

    @property
    def backend(self) -> str:
        """What carries tensors of this device: "nccl" or "gloo"; "none" when alone."""
        if not dist.is_initialized():
            return "none"
        carries = dist.get_backend_config(self.group)  # "cpu:gloo,cuda:nccl"
        return "nccl" if f"{self.device.type}:nccl" in carries else "gloo"

    def gather(self, value: Any) -> list[Any]:
        """The value of each of these ranks, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def sum_later(self, numbers: Tensor) -> Callable[[], list[float]]:
        """Begin to sum `numbers`, of one dimension, over these ranks. What is returned gives the
        sums: it waits until that is done, though not for what the device does after it."""
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
