"""Groups that last over generations: connected again, not made again. Runs on engines.

From torch 2.15 on gloo can give a group object new connections (`enable_reconfigure`), so that
what holds it continues: a DDP wrapper, a DeviceMesh, an FSDP module, a sub-group. Before, and
with NCCL, where it is not proven, the group is destroyed and another one formed (`forming.py`).

Names of torch that are private are each guarded by a test in `tests/engine/group/test_facts.py`.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from gpupool.core.wire.replies import GroupHandle, Joined
from gpupool.data import device as devices
from gpupool.engine.group import peers
from gpupool.engine.group.gloo_sockets import Listener
from gpupool.engine.group.rendezvous import exchange, wait_for_all

WORLD = "world"
LATE = "TORCH_GLOO_LAZY_INIT"
_GLOO = ("gloo", "cpu:gloo")  # back ends that are gloo alone
_c10d: Any = distributed_c10d  # whose private names are not annotated
_CONNECT_TIMEOUT = datetime.timedelta(seconds=20)  # for what takes milliseconds if all are there
_MAX_SUB_GROUPS = 1 << 20  # formed in one generation

left: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups that were left and are still held by something, the user's most likely."""


@dataclass(slots=True)
class _Lasting:
    """A group that can be connected again: its members, this rank's place, and where they meet.

    `listeners` are gloo's for it, see `peers.py`. The group is held weakly: one that the
    user has destroyed takes its sockets and threads along.
    """

    held: weakref.ref[dist.ProcessGroup]
    ranks: Sequence[int]
    place: int
    store: Any
    listeners: frozenset[Listener]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group; None if it is gone."""
        return self.held()


_ours: object = None  # the group of all ranks, if it was formed by the pool
_groups: dict[str, _Lasting] = {}
_generation = 0
_num_made: dict[str, int] = {}  # sub-groups by name, in this generation


def is_possible() -> bool:
    """Whether this torch can connect a group again; not where it checks what ranks call."""
    return hasattr(distributed_c10d, "_reconfigure") and not _is_checked()


def _is_checked() -> bool:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL, or `set_debug_level` in a cell: new groups are wrapped."""
    return bool(_c10d.get_debug_level() == _c10d.DebugLevel.DETAIL)


def can_bind() -> bool:
    """Whether a group bound to a GPU may have sub-groups of other back ends.

    Before, who is not in one splits NCCL's communicator for it, and waits there for its members.
    """
    parameters = inspect.signature(_c10d._get_split_source).parameters
    return "requested_backend" in parameters


def refuse_late_connections() -> None:
    """Raise if gloo is set to connect when it first sends, when nobody can look before."""
    __tracebackhide__ = True
    if os.environ.get(LATE, "0") not in ("", "0"):
        raise RuntimeError(
            f"{LATE} is set: connections that are made late cannot be proved to lead to ranks of "
            "this pool. Unset it."
        )


def own(group: object) -> None:
    """The pool has formed this group of all ranks; None: it was left, and with it all others."""
    global _ours
    _ours = group
    _groups.clear()
    _num_made.clear()


def keep(
    group: dist.ProcessGroup,
    rank: int,
    world_size: int,
    store: Any,
    listeners: frozenset[Listener],
) -> None:
    """The group of all ranks lasts. It was made with `enable_reconfigure`, and is not connected."""
    _groups[WORLD] = _Lasting(weakref.ref(group), range(world_size), rank, store, listeners)


def is_kept(store_path: str) -> bool:
    """Whether the group of all ranks that meets at this path is still the present one."""
    world = _groups.get(WORLD)
    return world is not None and world.group is dist.group.WORLD and world.store.path == store_path


def report() -> Joined:
    """The groups that are there, for the client to say which are connected."""
    found = {}
    for name, lasting in list(_groups.items()):
        group = lasting.group
        if group is None or group not in _c10d._world.pg_names:  # the user has destroyed it
            del _groups[name]
        else:
            found[name] = GroupHandle(lasting.ranks, group.get_reconfigure_handle())
    return Joined(found, int(_c10d._world.group_count))


def connect(
    generation: int, handles: Mapping[str, Sequence[str]], num_named: int
) -> frozenset[str]:
    """Connect these groups again; others of this rank are left, for a member of them is new.

    Returns the inodes of their connections.

    Args:
        handles: group -> the handles of its members, in order; the same on every rank.
        num_named: the same on every rank from now on.

    Raises:
        RuntimeError: another rank does not come.
        UnprovedError: a connection does not lead to a member.
    """
    global _generation
    _generation = generation
    _num_made.clear()
    for name in [name for name in _groups if name not in handles]:
        del _groups[name]
    lasting = [one.group for one in _groups.values()]
    for group in [one for one in _c10d._world.pg_map if one not in lasting]:
        left.add(group)
        dist.destroy_process_group(group)
    world = _groups[WORLD]
    listeners = frozenset().union(*(one.listeners for one in _groups.values()))
    peers.set_deaf(listeners, False)
    wait_for_all(world.store, f"connect{generation}", world.place, len(world.ranks))
    connections: set[str] = set()
    for name, members in handles.items():
        if name in _groups:
            connections |= _reconfigure(_groups[name], generation * _MAX_SUB_GROUPS, members)
    peers.set_deaf(listeners, True)
    _c10d._world.group_count = num_named
    return frozenset(connections)


def install() -> None:
    """Have sub-groups proved, and those of a lasting group last too."""
    make = _c10d._new_process_group_helper

    @functools.wraps(make)
    def making(
        size: int, place: int | None, ranks: list[int], backend: Any, store: Any, name: str,
        *args: Any, **options: Any,
    ) -> Any:  # fmt: skip
        __tracebackhide__ = True
        if ranks and _is_ours() and str(backend) not in _GLOO and name.isdecimal():
            # NCCL splits the communicator of all ranks: who waits in torch for one that does not
            # come cannot be freed. (A name in hexadecimal is that of a group its members form.)
            world: Any = dist.group.WORLD
            key, device = f"gpupool{_generation}/all/{name}", "cuda" if devices.has_gpu() else "cpu"
            found = exchange(store, key, world.rank(), world.size(), device)
            refuse_without_gpu("new_group", backend, {rank: found[rank] for rank in ranks})
        if not ranks or place is None or not _is_ours() or not has_gloo(backend):
            return make(size, place, ranks, backend, store, name, *args, **options)
        refuse_late_connections()
        lasts = WORLD in _groups and not _is_checked() and str(backend) in _GLOO
        if lasts:
            options["enable_reconfigure"] = True
        known = set(_c10d._world.pg_map)

        def one() -> Any:
            number = _num_made[name] = _num_made.get(name, 0) + 1
            key = f"gpupool{_generation}/{name}/{number}"
            if not lasts:
                wait_for_all(store, key, place, size)
            made: Any = ()
            before, failed = peers.listeners(), ""
            prefix = dist.PrefixStore(key, store)  # type: ignore[attr-defined]
            try:
                made = make(size, place, ranks, backend, prefix, name, *args, **options)
            except RuntimeError as error:
                failed = str(error)
            if made and made[0] in known:  # one of the same tag
                return made
            listeners = peers.listeners() - before
            try:
                if lasts and not failed:
                    held = weakref.ref(made[0])
                    _connect_new(
                        name, number, _Lasting(held, list(ranks), place, prefix, listeners)
                    )
                else:
                    peers.prove(store, f"{key}/proof", place, size, listeners, failed)
                    peers.set_deaf(listeners, True)
            except BaseException:
                if made:
                    _c10d._world.pg_group_ranks[made[0]] = {}  # torch notes it after this function
                    dist.destroy_process_group(made[0])
                raise
            return made

        return _until_proved(one)

    _c10d._new_process_group_helper = making


def _is_ours() -> bool:
    """Whether the present group of all ranks is one that the pool has formed."""
    return _ours is not None and dist.group.WORLD is _ours


def has_gloo(backend: Any) -> bool:
    """Whether a group of this backend carries the tensors of some device by gloo."""
    return "gloo" in str(backend) or str(backend) == "undefined"


def has_nccl(backend: Any) -> bool:
    """Whether a group of this backend carries the tensors of some device by NCCL."""
    return "nccl" in str(backend).lower()


def refuse_without_gpu(function: str, backend: Any, found: Mapping[int, str]) -> None:
    """Raise a ValueError, on all ranks alike, if NCCL is asked for and a member has no GPU.

    Those that have one would wait inside torch for the others, which torch refuses there.

    Args:
        found: rank -> its device.
    """
    __tracebackhide__ = True
    lacking = [str(rank) for rank, device in found.items() if device == "cpu"]
    if lacking and has_nccl(backend):
        raise ValueError(
            f"{function}: {str(backend)!r} needs a GPU for every rank that takes part; rank "
            f"{', '.join(lacking)} has none. Without a back end it takes one that all ranks have."
        )


def splitting(split: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.distributed.split_group` whose part of a lasting group is connected, and lasts too."""

    @functools.wraps(split)
    def split_group(parent_pg: Any = None, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        parent: Any = parent_pg or dist.group.WORLD
        if not _is_ours() or parent not in _c10d._world.pg_map:
            return split(parent_pg, *args, **options)
        owner = next((one for one in _groups.values() if one.group is parent), None)
        listeners = (
            owner.listeners if owner else peers.listeners()
        )  # gloo shares them with the part

        def one() -> Any:
            number = _num_made["split"] = _num_made.get("split", 0) + 1
            if owner is None:
                peers.set_deaf(listeners, False)
                key = f"gpupool{_generation}/split/{number}"
                wait_for_all(_c10d._world.pg_map[parent][1], key, parent.rank(), parent.size())
            group = split(parent_pg, *args, **options)
            if not isinstance(group, dist.ProcessGroup):
                return group
            name, ranks = _c10d._world.pg_names[group], dist.get_process_group_ranks(group)
            store, place = _c10d._world.pg_map[group][1], group.rank()
            try:
                if owner:
                    made = _Lasting(weakref.ref(group), ranks, place, store, listeners)
                    _connect_new(name, number, made)
                elif has_gloo(_c10d._world.pg_map[group][0]):
                    peers.prove(store, f"proof{number}", place, len(ranks), listeners)
            except BaseException:
                dist.destroy_process_group(group)
                raise
            return group

        try:
            return _until_proved(one)
        finally:
            peers.set_deaf(listeners, True)

    return split_group


def _until_proved(make: Callable[[], Any]) -> Any:
    """What `make` makes; again, with new listeners, if a stranger has disturbed.

    All members see the same, so that all try again.
    """
    __tracebackhide__ = True
    for _ in range(peers.NUM_ATTEMPTS - 1):
        try:
            return make()
        except peers.UnprovedError:
            continue
    return make()


def _connect_new(name: str, number: int, made: _Lasting) -> None:
    """Connect a sub-group for the first time; its members meet at its own part of the store."""
    __tracebackhide__ = True
    uuid = _generation * _MAX_SUB_GROUPS + number
    peers.set_deaf(made.listeners, False)
    handle = _of(made).get_reconfigure_handle()
    handles = exchange(made.store, f"gpupool{uuid}", made.place, len(made.ranks), handle)
    _reconfigure(made, uuid, handles)
    peers.set_deaf(made.listeners, True)
    _groups[name] = made


def _reconfigure(lasting: _Lasting, uuid: int, handles: Sequence[str]) -> frozenset[str]:
    """Connect a group and prove its connections; returns their inodes."""
    __tracebackhide__ = True
    options, failed = _c10d.ReconfigureOptions(), ""
    options.uuid, options.handles, options.timeout = uuid, list(handles), _CONNECT_TIMEOUT
    try:
        _of(lasting).reconfigure(options).wait()
    except RuntimeError as error:
        failed = str(error)
    size = len(lasting.ranks)
    return peers.prove(
        lasting.store, f"proof{uuid}", lasting.place, size, lasting.listeners, failed
    )


def _of(lasting: _Lasting) -> Any:
    group = lasting.group
    assert group is not None  # torch's own table holds it
    return group
