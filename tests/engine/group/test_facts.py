"""What abort and re-form rely on in torch and gloo, which these do not promise.

One test names each fact, on ranks of plain torch. If one fails after an upgrade, then
`gpupool/engine/group/abort.py`, `gpupool/engine/group/forming.py` or
`gpupool/pool/calls/execution.py` has to change.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpupool.engine.group.gloo_sockets import gloo_connections
from tests.engine.group.torch_ranks import run_ranks


def all_reduce(group: Any = None) -> float:
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    return one.item()


# ---- gloo's sockets --------------------------------------------------------------------------


def epoll_sets() -> list[list[str]]:
    """What each epoll set of this process watches."""
    sets = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(fd) == "anon_inode:[eventpoll]":
                info = Path(f"/proc/self/fdinfo/{fd.name}").read_text().splitlines()
                watched = [line.split()[1] for line in info if line.startswith("tfd:")]
                sets.append([os.readlink(f"/proc/self/fd/{number}") for number in watched])
        except OSError:
            continue
    return sets


def shape_of_the_loop(rank: int) -> list[tuple[int, int, int]]:
    return [
        tuple(sum(kind in target for target in watched) for kind in ("pipe:", "eventfd", "socket:"))
        for watched in epoll_sets()
    ]  # type: ignore[return-value]


def test_a_gloo_loop_watches_a_pipe_a_listener_and_the_connections_and_no_eventfd() -> None:
    assert run_ranks(shape_of_the_loop, n=3) == [[(1, 0, 1 + 2)]] * 3


def count_connections(rank: int) -> list[int]:
    counts = [len(gloo_connections())]
    sub = dist.new_group()
    counts.append(len(gloo_connections()))
    all_reduce(sub)
    return [*counts, len(gloo_connections())]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_group_has_a_connection_to_every_other_rank_before_its_first_collective(n: int) -> None:
    assert run_ranks(count_connections, n=n) == [[n - 1, 2 * (n - 1), 2 * (n - 1)]] * n


def test_rpc_lets_go_of_references_by_one_function_that_takes_a_time() -> None:
    from torch.distributed.rpc import api

    rpc: Any = api
    said = rpc._delete_all_user_and_unforked_owner_rrefs.__doc__
    assert "(timeout: datetime.timedelta = " in said
    assert "_delete_all_user_and_unforked_owner_rrefs()" in inspect.getsource(rpc.shutdown)
    assert not rpc._ALL_WORKER_NAMES


# ---- where groups are made -------------------------------------------------------------------


def who_makes_groups(rank: int) -> dict[str, int]:
    """What makes groups -> how often torch's one function for it was called."""
    from torch.distributed.device_mesh import init_device_mesh

    calls: dict[str, int] = {}
    current = ""

    def notice(frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_name == "_new_process_group_helper":
            calls[current] = calls.get(current, 0) + 1

    ways: dict[str, Callable[[], object]] = {
        "new_group": dist.new_group,
        "new_subgroups": lambda: dist.new_subgroups(1),
        "DeviceMesh": lambda: init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b")),
    }
    for current, make in ways.items():  # noqa: B007 (noticed above)
        sys.setprofile(notice)
        make()
        sys.setprofile(None)
    return calls


def test_all_groups_are_made_by_one_function_of_torch() -> None:
    for calls in run_ranks(who_makes_groups):
        assert calls.keys() == {"new_group", "new_subgroups", "DeviceMesh"}
