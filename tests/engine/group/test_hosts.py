"""Groups of ranks on several hosts: where they meet, and that no stranger takes a place."""

from __future__ import annotations

import datetime
import gc
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from gpupool.core.machine.topology import Rank
from gpupool.core.wire.calls import GroupPlan
from gpupool.engine.group import claims, forming
from gpupool.engine.group.gloo_sockets import ends_of, gloo_connections, is_over
from tests.engine.group.test_gloo_sockets import end, knock, listeners
from tests.engine.group.torch_ranks import plan_at, run_hosts
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


def forms(here: Rank, plan: GroupPlan) -> dict[str, Any]:
    """A group, sub-groups, one of a script's asking, and the next generation."""
    forming.connect(plan, here)
    sums = [total(), total(dist.new_group([0, 1, 2]))]
    dist.new_group([1, 2])  # its members have connections to one that is no member
    addresses = {address for address, _ in listeners()}
    dist.destroy_process_group()
    forming.form_as_asked({}, here)
    sums.append(total())
    server = forming._server
    if opened := forming.join():
        server.set("next", opened)
    following = plan_at(server.get("next").decode())
    forming.connect(following, here)
    del server
    sums.append(total())
    ports = {port for _, port in listeners()}
    servers = [int(one.store.rpartition(":")[2]) in ports for one in (plan, following)]
    threading.Timer(0.2, forming.give_up_waiting).start()
    freed = error_of(lambda: forming._server.wait(["never"], datetime.timedelta(seconds=50)))
    return {"sums": sums, "at": addresses, "servers": servers, "freed": "50000ms" not in freed}


def test_ranks_meet_at_a_server_of_rank_0_that_listens_at_its_address_alone() -> None:
    found = run_hosts(forms, n=3)
    usual = {"sums": [3.0] * 4, "at": {"127.0.0.1"}, "servers": [False, False], "freed": True}
    assert found == [{**usual, "servers": [False, True]}, usual, usual]


def ends() -> set[Any]:
    with gloo_connections() as connections:
        return {*map(ends_of, connections)}


def with_a_guest(here: Rank, plan: GroupPlan) -> tuple[str, str, float]:
    """Rank 0 has one: his address, what is said when a sub-group is made, and a sum after that."""
    forming.connect(plan, here)
    address, before = "", ends()
    if here.rank == 0:
        server = int(plan.store.rpartition(":")[2])
        (port,) = {port for _, port in listeners()} - {server}
        pid = knock(port, "127.0.0.1", os.getuid())
        until(lambda: len(ends()) == 2, 10.0, "gloo's taking the connection")
        ((_, address),) = ends() - before
    said = error_of(dist.new_group)
    if here.rank == 0:
        end(pid)
    return address, said, total()


def test_who_is_no_rank_is_shut_out_and_named_and_nobody_else_is() -> None:
    (address, said, total0), other = run_hosts(with_a_guest)
    assert said.startswith(f"{address}, ")
    assert " on gpu0, " in said
    assert (total0, other) == (2.0, ("", "", 2.0))


def robbed(here: Rank, plan: GroupPlan) -> str:
    """What rank 0 of two says when a third process has taken the place of rank 1."""
    if here.rank == 2:  # he has all that the network shows, and a key of his own
        store = dist.PrefixStore(plan.store, forming._meet(plan.store))  # type: ignore[attr-defined]
        forming._torch_init("gloo", store=store, rank=1, world_size=2)
        store.set("gpupool//ends/1", claims.claim("00" * 32))
    if here.rank != 0:
        return ""
    said = error_of(lambda: forming.connect(plan, replace(here, world_size=2)))
    with gloo_connections() as connections:
        assert all(map(is_over, connections))
    return said


def test_a_claim_without_the_key_is_not_believed() -> None:
    said, *_ = run_hosts(robbed, n=3)
    assert said.startswith("127.0.0.1:")


def alone(here: Rank, plan: GroupPlan) -> str:
    """What is said where the third rank does not come: rank 0 is freed, then its server ends."""
    here = replace(here, world_size=3)
    if here.rank == 1:
        return error_of(lambda: forming.connect(plan, here))
    came = [f"{plan.store}/gpupool/0/{rank}" for rank in range(2)]

    def free() -> None:
        until(lambda: forming._server.check(came), 20.0, "both ranks' waiting")
        forming.give_up_waiting()

    freeing = threading.Thread(target=free)
    freeing.start()
    said = error_of(lambda: forming.connect(plan, here))
    freeing.join()
    forming._server = forming._store = None
    gc.collect()
    return said


def test_a_rank_that_does_not_come_is_given_up_and_so_is_a_server() -> None:
    assert run_hosts(alone) == [forming._NOT_COMING] * 2
