"""Groups of ranks on several hosts: where they meet, and that no stranger takes a place."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from gpupool.core.machine.topology import Rank
from gpupool.core.wire import environ
from gpupool.core.wire.calls import GroupPlan
from gpupool.engine.group import claims, forming
from gpupool.engine.group.gloo_sockets import ends_of, gloo_connections, is_over
from tests.engine.group.test_gloo_sockets import end, knock, listeners
from tests.engine.group.torch_ranks import run_ranks
from tests.support.processes import until


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


def joined(rank: int) -> tuple[Rank, GroupPlan]:
    """This rank as if each was on another host; all have joined, and can `connect` by the plan."""
    n = dist.get_world_size()
    here = Rank(rank, n, "cpu", None, 1, 0, 1, rank, n, f"gpu{rank}", "127.0.0.1", "lo")
    os.environ[environ.RANK] = json.dumps(asdict(here))
    forming.install()
    store = [forming.join()]
    dist.broadcast_object_list(store)
    forming.leave()
    return here, GroupPlan(store[0], "gloo", range(n), "gloo", key="5ec2e7" * 8)


def ends() -> set[Any]:
    with gloo_connections() as connections:
        return {*map(ends_of, connections)}


def with_a_guest(rank: int) -> tuple[str, str, list[float]]:
    """Rank 0 has one: his address, what is said when a sub-group is made, sums of groups after."""
    here, plan = joined(rank)
    forming.connect(plan, here)
    address, before = "", ends()
    if rank == 0:
        server = int(plan.store.rpartition(":")[2])
        (port,) = {port for _, port in listeners()} - {server}
        pid = knock(port, "127.0.0.1", os.getuid())
        until(lambda: len(ends()) == 3, 10.0, "gloo's taking the connection")
        ((_, address),) = ends() - before
    said = error_of(dist.new_group)
    if rank == 0:
        end(pid)
    sums = [total(), total(dist.new_group([0, 1, 2]))]
    dist.new_group([1, 2])  # its members have connections to one that is no member
    dist.destroy_process_group()
    forming.form_as_asked({}, here)
    sums.append(total())
    return address, said, sums


def test_who_is_no_rank_is_shut_out_and_named_and_nobody_else_is() -> None:
    (address, said, _), *others = found = run_ranks(with_a_guest, n=3)
    assert said.startswith(f"{address}, ")
    assert " on gpu0, " in said
    assert [one[:2] for one in others] == [("", "")] * 2
    assert [sums for *_, sums in found] == [[3.0] * 3] * 3


def robbed(rank: int) -> str:
    """What rank 0 of two says when a third process has taken the place of rank 1."""
    here, plan = joined(rank)
    if rank == 2:  # he has all that the network shows, and a key of his own
        store = dist.PrefixStore(plan.store, forming._meet(plan.store))  # type: ignore[attr-defined]
        forming._torch_init("gloo", store=store, rank=1, world_size=2)
        store.set("gpupool//ends/1", claims.claim("00" * 32))
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
