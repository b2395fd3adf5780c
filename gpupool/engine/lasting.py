"""Groups that last over generations: connected anew, not made anew. Runs on engines.

From torch 2.15 on gloo can give a group object new connections (`enable_reconfigure`), so that
what holds it goes on: a DDP wrapper, a DeviceMesh, an FSDP module, a sub-group. Before, and
with NCCL, where it is not proven, the group is destroyed and another one formed (`group.py`).

Names of torch that are private are each guarded by a test in `tests/faults/test_facts.py`.
"""

from __future__ import annotations

import datetime
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

WORLD = "world"
LATE = "TORCH_GLOO_LAZY_INIT"
_c10d: Any = distributed_c10d  # whose private names are not annotated
_CONNECT_TIMEOUT = datetime.timedelta(seconds=20)  # for what takes milliseconds if all are there
_POLL_S = 0.003
_MAX_SUB_GROUPS = 1 << 20  # formed in one generation

left: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups that were left and are still held by something, the user's most likely."""

_give_up = threading.Event()  # whoever waits for other ranks is to stop waiting


@dataclass(slots=True)
class _Lasting:
    """A group that can be connected anew: its members, this rank's place, and where they meet."""

    group: dist.ProcessGroup
    ranks: Sequence[int]
    place: int
    store: Any


_ours: object = None  # the group of all ranks, if it was formed by the pool
_groups: dict[str, _Lasting] = {}
_generation = 0
_num_made: dict[str, int] = {}  # sub-groups by name, in this generation


def is_possible() -> bool:
    """Whether this torch can connect a group anew.

    Not where it makes connections late, nor where it wraps groups to check what ranks call.
    """
    return hasattr(distributed_c10d, "_reconfigure") and not connects_late() and not _is_checked()


def _is_checked() -> bool:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL, or `set_debug_level` in a cell: new groups are wrapped."""
    return bool(_c10d.get_debug_level() == _c10d.DebugLevel.DETAIL)


def connects_late() -> bool:
    """Whether gloo has been told to make connections when they are needed, and not at once."""
    return os.environ.get(LATE, "0") not in ("", "0")


def own(group: object) -> None:
    """The pool has formed this group of all ranks; None: it was left, and with it all others."""
    global _ours
    _ours = group
    _groups.clear()
    _num_made.clear()


def keep(group: dist.ProcessGroup, rank: int, world_size: int, store: Any) -> None:
    """The group of all ranks lasts. It was made with `enable_reconfigure`, and is not connected."""
    _groups[WORLD] = _Lasting(group, range(world_size), rank, store)


def is_kept(store_path: str) -> bool:
    """Whether the group of all ranks that meets at this path is still the present one."""
    world = _groups.get(WORLD)
    return world is not None and world.group is dist.group.WORLD and world.store.path == store_path


def report() -> dict[str, Any]:
    """name -> "ranks" and "handle" of each group, for the client to say which are connected."""
    named = _c10d._world.pg_names
    for name, lasting in list(_groups.items()):
        if lasting.group not in named:  # the user has destroyed it
            del _groups[name]
    return {
        name: {"ranks": list(lasting.ranks), "handle": lasting.group.get_reconfigure_handle()}
        for name, lasting in _groups.items()
    }


def num_named() -> int:
    """How many groups this rank has given a name: the next one's name follows from it."""
    return int(_c10d._world.group_count)


def connect(generation: int, handles: Mapping[str, Sequence[str]], num_named: int) -> None:
    """Connect these groups anew; others of this rank are left, for a member of them is new.

    Args:
        handles: group -> the handles of its members, in order; the same on every rank.
        num_named: the same on every rank from now on.

    Raises:
        RuntimeError: another rank does not come.
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
    wait_for_all(world.store, f"connect{generation}", world.place, len(world.ranks))
    for name, members in handles.items():
        if name in _groups:
            _reconfigure(_groups[name].group, generation * _MAX_SUB_GROUPS, members)
    _c10d._world.group_count = num_named


def install() -> None:
    """Have sub-groups of a lasting group last too, and ranks wait for each other in Python.

    One that waits inside torch for another that does not come could not be interrupted.
    """
    make = _c10d._new_process_group_helper

    @functools.wraps(make)
    def making(
        size: int, place: int | None, ranks: list[int], backend: Any, store: Any, name: str,
        *args: Any, **options: Any,
    ) -> Any:  # fmt: skip
        __tracebackhide__ = True
        is_ours = _ours is not None and dist.group.WORLD is _ours
        if not ranks or place is None or not is_ours or str(backend) not in ("gloo", "cpu:gloo"):
            return make(size, place, ranks, backend, store, name, *args, **options)
        number = _num_made[name] = _num_made.get(name, 0) + 1
        if WORLD not in _groups or _is_checked():
            wait_for_all(store, f"gpupool/{name}/{number}", place, size)
            return make(size, place, ranks, backend, store, name, *args, **options)
        known = set(_c10d._world.pg_map)
        options["enable_reconfigure"] = True
        group, own_store = make(size, place, ranks, backend, store, name, *args, **options)
        if group not in known:
            try:
                _connect_new(name, number, _Lasting(group, list(ranks), place, own_store))
            except BaseException:
                _c10d._world.pg_group_ranks[group] = {}  # torch notes it after this function
                dist.destroy_process_group(group)
                raise
        return group, own_store

    _c10d._new_process_group_helper = making


def splitting(split: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.distributed.split_group` whose part of a lasting group is connected, and lasts too."""

    @functools.wraps(split)
    def split_group(parent_pg: Any = None, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        group = split(parent_pg, *args, **options)
        parent = parent_pg or dist.group.WORLD
        lasts = any(lasting.group is parent for lasting in _groups.values())
        if not lasts or not isinstance(group, dist.ProcessGroup):
            return group
        name, ranks = _c10d._world.pg_names[group], dist.get_process_group_ranks(group)
        number = _num_made[name] = _num_made.get(name, 0) + 1
        store = _c10d._world.pg_map[group][1]
        try:
            _connect_new(name, number, _Lasting(group, ranks, group.rank(), store))
        except BaseException:
            dist.destroy_process_group(group)
            raise
        return group

    return split_group


def _connect_new(name: str, number: int, made: _Lasting) -> None:
    """Connect a sub-group for the first time; its members meet at its own part of the store."""
    __tracebackhide__ = True
    uuid = _generation * _MAX_SUB_GROUPS + number
    prefix = f"gpupool{uuid}/"
    made.store.set(f"{prefix}{made.place}", made.group.get_reconfigure_handle())
    keys = [f"{prefix}{place}" for place in range(len(made.ranks))]
    _wait(made.store, keys)
    _reconfigure(made.group, uuid, [made.store.get(key).decode() for key in keys])
    _groups[name] = made


def _reconfigure(group: dist.ProcessGroup, uuid: int, handles: Sequence[str]) -> None:
    options = _c10d.ReconfigureOptions()
    options.uuid, options.handles, options.timeout = uuid, list(handles), _CONNECT_TIMEOUT
    group.reconfigure(options).wait()


# ---- waiting for other ranks -----------------------------------------------------------------


def wait_for_all(store: Any, key: str, place: int, size: int) -> None:
    """Wait until all members have come here; unlike torch's own waiting it can be ended.

    Raises:
        RuntimeError: `give_up_waiting` was called meanwhile.
    """
    __tracebackhide__ = True
    store.set(f"{key}/{place}", "")
    _wait(store, [f"{key}/{place}" for place in range(size)])


def give_up_waiting() -> None:
    """Have this rank wait no longer for others that do not come; from any thread."""
    _give_up.set()


def begin_waiting() -> None:
    """Waiting makes sense again: all ranks are asked to come."""
    _give_up.clear()


def _wait(store: Any, keys: Sequence[str]) -> None:
    __tracebackhide__ = True
    while not store.check(keys):
        if _give_up.is_set():
            raise RuntimeError("init_process_group: another rank has failed, and does not come.")
        time.sleep(_POLL_S)
