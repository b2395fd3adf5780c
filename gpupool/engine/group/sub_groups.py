"""Sub-groups that cells form of the pool's group: awaited, and proved. Runs on engines.

Names of torch that are private are each guarded by a test in `tests/engine/group/test_facts.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from gpupool.data import device as devices
from gpupool.engine.group import forming, peers
from gpupool.engine.group.rendezvous import exchange, wait_for_all

_c10d: Any = distributed_c10d  # whose private names are not annotated


def install() -> None:
    """Have sub-groups proved."""
    make = _c10d._new_process_group_helper

    @functools.wraps(make)
    def making(
        size: int, place: int | None, ranks: list[int], backend: Any, store: Any, name: str,
        *args: Any, **options: Any,
    ) -> Any:  # fmt: skip
        __tracebackhide__ = True
        is_gloo = forming.is_gloo_alone(backend)
        if ranks and forming.is_ours() and not is_gloo and name.isdecimal():
            # NCCL splits the communicator of all ranks: who waits in torch for one that does not
            # come cannot be freed. (A name in hexadecimal is that of a group its members form.)
            world: Any = dist.group.WORLD
            device = "cuda" if devices.has_gpu() else "cpu"
            found = exchange(store, f"gpupool/all/{name}", world.rank(), world.size(), device)
            forming.refuse_without_gpu("new_group", backend, {rank: found[rank] for rank in ranks})
        if not ranks or place is None or not forming.is_ours() or not forming.has_gloo(backend):
            return make(size, place, ranks, backend, store, name, *args, **options)
        forming.refuse_late_connections()
        timeout = options.get("timeout") or forming.TIMEOUT
        if is_gloo:
            options["timeout"] = forming.CONNECT_TIMEOUT
        known = set(_c10d._world.pg_map)

        def one() -> Any:
            key = f"gpupool/{name}/{forming.number_made(name)}"
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
                peers.prove(store, f"{key}/proof", place, size, listeners, failed)
                peers.set_deaf(listeners, True)
                if is_gloo:
                    forming.set_timeout(made[0], timeout)
            except BaseException:
                if made:
                    _c10d._world.pg_group_ranks[made[0]] = {}  # torch notes it after this function
                    dist.destroy_process_group(made[0])
                raise
            return made

        return _until_proved(one)

    _c10d._new_process_group_helper = making


def splitting(split: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.distributed.split_group` whose parts are proved."""

    @functools.wraps(split)
    def split_group(parent_pg: Any = None, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        parent: Any = parent_pg or dist.group.WORLD
        if not forming.is_ours() or parent not in _c10d._world.pg_map:
            return split(parent_pg, *args, **options)
        listeners = peers.listeners()  # gloo shares them with the part

        def one() -> Any:
            number = forming.number_made("split")
            peers.set_deaf(listeners, False)
            store = _c10d._world.pg_map[parent][1]
            wait_for_all(store, f"gpupool/split/{number}", parent.rank(), parent.size())
            group = split(parent_pg, *args, **options)
            if not isinstance(group, dist.ProcessGroup):
                return group
            backend, store = _c10d._world.pg_map[group]
            if forming.has_gloo(backend):
                size = len(dist.get_process_group_ranks(group))
                try:
                    peers.prove(store, f"proof{number}", group.rank(), size, listeners)
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
