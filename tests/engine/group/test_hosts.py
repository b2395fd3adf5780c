"""Groups of ranks on one host and on several: where they meet, and that no stranger takes a place.

`tests/security/` has another user attack whole pools.
"""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from gpupool.core.machine.topology import Rank
from gpupool.core.wire import environ
from gpupool.core.wire.calls import GroupPlan
from gpupool.engine.group import forming, gloo_sockets
from gpupool.engine.group.forming import World
from gpupool.engine.group.gloo_sockets import ends_of, gloo_connections, is_over
from tests.engine.group.torch_ranks import run_ranks
from tests.support.processes import until


def listeners() -> set[int]:
    """The ports where this process listens: gloo's, and those of stores."""
    found = psutil.Process().net_connections(kind="tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


def total(group: Any = None) -> float:
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    return one.item()


def error_of(work: Callable[[], object]) -> str:
    try:
        work()
    except RuntimeError as error:
        return str(error)
    return ""


def joined(rank: int, folder: Path | None = None) -> tuple[Rank, GroupPlan]:
    """This rank as if each was on another host; all have joined, and can `connect` by the plan.

    With a folder for their store they are on one host.
    """
    n = dist.get_world_size()
    here = Rank(rank, n, "cpu", None, 1, 0, 1, rank, n, f"gpu{rank}", "127.0.0.1", "lo")
    if folder is not None:
        here = Rank(rank, n, "cpu", None, 1, rank, n, 0, 1)
    os.environ[environ.RANK] = json.dumps(asdict(here))
    forming.install()
    store = [forming.join() or f"{folder}/plan"]
    dist.broadcast_object_list(store)
    forming.leave()
    return here, GroupPlan(store[0], "gloo", range(n), "gloo", "" if folder else "5ec2e7" * 8)


def ends() -> set[Any]:
    with gloo_connections() as connections:
        return {*map(ends_of, connections)}


def with_a_guest(rank: int, folder: Path | None) -> tuple[str, str, list[float]]:
    """Rank 0 has one: his address, what is said when a sub-group is made, sums of groups after."""
    here, plan = joined(rank, folder)
    forming.connect(plan, here)
    address, before = "", ends()
    if rank == 0:
        server = 0 if folder else int(plan.store.rpartition(":")[2])
        (port,) = listeners() - {server}
        guest = socket.create_connection(("127.0.0.1", port))  # and says nothing
        until(lambda: len(ends()) == 3, 10.0, "gloo's taking the connection")
        ((_, address),) = ends() - before
    said = error_of(dist.new_group)
    if rank == 0:
        guest.close()
    sums = [total(), total(dist.new_group([0, 1, 2]))]
    dist.new_group([1, 2])  # its members have connections to one that is no member
    dist.destroy_process_group()
    forming.form_as_asked({}, here)
    sums.append(total())
    return address, said, sums


@pytest.mark.parametrize("num_hosts", [1, 3])
def test_who_is_no_rank_is_shut_out_and_named_and_nobody_else_is(
    tmp_path: Path, num_hosts: int
) -> None:
    folder = tmp_path if num_hosts == 1 else None
    (address, said, _), *others = found = run_ranks(with_a_guest, folder, n=3)
    assert said.startswith(f"{address}, ")
    assert f" on {socket.gethostname() if num_hosts == 1 else 'gpu0'}, " in said
    assert [one[:2] for one in others] == [("", "")] * 2
    assert [sums for *_, sums in found] == [[3.0] * 3] * 3


def trained(rank: int, folder: Path) -> list[float]:
    """Sums of those that train, first two of three ranks and then one; then of a group of all."""
    here, plan = joined(rank, folder)
    forming.connect(plan, here)
    found = []
    for num in (2, 1):
        if rank < num:
            world = World.here(torch.device("cpu"), num)
            assert (world.rank, world.size, world.group) == (rank, num, forming.training_group())
            found.append(total(world.group))
    assert World.here(torch.device("cpu")).group is None
    return [*found, total(dist.new_group())]


def test_some_ranks_train_alone_and_all_make_groups_after_it(tmp_path: Path) -> None:
    assert run_ranks(trained, tmp_path, n=3) == [[2.0, 1.0, 3.0], [2.0, 3.0], [3.0]]


def robbed(rank: int) -> str:
    """What rank 0 of two says when a third process has taken the place of rank 1."""
    here, plan = joined(rank)
    if rank == 2:  # he has all that the network shows, and a key of his own
        store = dist.PrefixStore(plan.store, forming._meet(plan.store))  # type: ignore[attr-defined]
        forming._torch_init("gloo", store=store, rank=1, world_size=2)
        store.set("gpupool//ends/1", gloo_sockets.claim("00" * 32))
    if rank != 0:
        return ""
    said = error_of(lambda: forming.connect(plan, replace(here, world_size=2)))
    with gloo_connections() as connections:
        assert all(map(is_over, connections))
    return said


def test_a_claim_without_the_key_is_not_believed() -> None:
    said, *_ = run_ranks(robbed, n=3)
    assert said.startswith("127.0.0.1:")


def left_alone(rank: int) -> str:
    """What rank 1 says when rank 0 does not come, and its server ends."""
    here, plan = joined(rank)
    if rank == 1:
        return error_of(lambda: forming.connect(plan, here))
    waits = [f"{plan.store}/gpupool/0/1"]
    until(lambda: forming._server.check(waits), 20.0, "its waiting")
    forming._server = None
    gc.collect()
    return ""


def test_nobody_waits_for_a_server_that_has_ended() -> None:
    assert run_ranks(left_alone) == ["", forming._NOT_COMING]
