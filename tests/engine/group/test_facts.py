"""What abort and re-form rely on in torch and gloo, which these do not promise.

One test names each fact, on ranks of plain torch. If one fails after an upgrade, then
`gpupool/engine/group/abort.py`, `gpupool/engine/group/forming.py` or
`gpupool/pool/calls/execution.py` has to change.
"""

from __future__ import annotations

import inspect
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gpupool.engine.group.abort import abort_collectives
from gpupool.engine.group.gloo_sockets import gloo_connections
from tests.engine.group.torch_ranks import Ended, run_ranks


def all_reduce(group: Any = None) -> float:
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    return one.item()


class Blocked(threading.Thread):
    """A thread that is in a collective, or anything else, for which the peers do not come."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.error = ""
        self.start()
        self.is_blocked(0.3)

    def run(self) -> None:
        try:
            self._call()
        except RuntimeError as error:  # DistStoreError and DistBackendError too
            self.error = str(error)

    def is_blocked(self, seconds: float) -> bool:
        self.join(seconds)
        return self.is_alive()


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


def test_with_lazy_init_there_is_no_connection_yet_so_it_is_switched_off() -> None:
    """A rank whose connection is still to be made is waiting in the store, and nothing that we do
    to sockets reaches it. Nobody could look who has connected, either."""
    counts = run_ranks(count_connections, n=3, TORCH_GLOO_LAZY_INIT="1")
    assert min(first for first, *_ in counts) == 0  # a slower rank may see those that others made


def test_gloos_loop_of_libuv_is_not_built_in() -> None:
    """It has an eventfd, so that its connections would not be found."""
    with pytest.raises(AssertionError, match="unsupported gloo device"):
        run_ranks(count_connections, n=1, GLOO_DEVICE_TRANSPORT="UV")


def test_rpc_lets_go_of_references_by_one_function_that_takes_a_time() -> None:
    from torch.distributed.rpc import api

    rpc: Any = api
    said = rpc._delete_all_user_and_unforked_owner_rrefs.__doc__
    assert "(timeout: datetime.timedelta = " in said
    assert "_delete_all_user_and_unforked_owner_rrefs()" in inspect.getsource(rpc.shutdown)
    assert not rpc._ALL_WORKER_NAMES


# ---- what frees, and what does not -----------------------------------------------------------


def what_frees(rank: int) -> dict[str, bool]:
    """What has been tried -> whether rank 0 was still blocked afterwards."""
    sub = dist.new_group()
    if rank == 1:
        return {}
    waiting = Blocked(lambda: all_reduce(sub))
    backend = sub._get_backend(torch.device("cpu"))
    tries: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "signal": lambda: signal.pthread_kill(waiting.ident or 0, signal.SIGUSR1),
        "ProcessGroup.abort": sub.abort,
        "Backend.abort": backend.abort,
        "ProcessGroup.shutdown": sub.shutdown,
        "Backend.shutdown": backend.shutdown,
        "_abort_process_group": lambda: distributed_c10d._abort_process_group(sub),
        "destroy_process_group": dist.destroy_process_group,
    }
    signal.signal(signal.SIGUSR1, lambda *_: None)
    blocked = {}
    for name, call in tries.items():
        call()
        blocked[name] = waiting.is_blocked(0.15)
    abort_collectives()
    blocked["shutdown(2)"] = waiting.is_blocked(10.0)
    assert "Connection closed by peer" in waiting.error, waiting.error
    return blocked


def test_only_shutting_its_connections_frees_a_rank_from_a_gloo_collective() -> None:
    blocked, _ = run_ranks(what_frees)
    assert [name for name, still in blocked.items() if not still] == ["shutdown(2)"]


def the_peer_is_shut(rank: int) -> str:
    store = distributed_c10d._get_default_store()
    if rank == 0:
        waiting = Blocked(all_reduce)
        store.set("waits", "")
        assert not waiting.is_blocked(10.0)
        return waiting.error
    store.wait(["waits"])
    assert abort_collectives() == 1
    return ""


def test_the_peer_of_a_connection_that_was_shut_is_freed_too() -> None:
    error, _ = run_ranks(the_peer_is_shut)
    assert "Connection closed by peer" in error


def shut_the_listener(rank: int) -> None:
    connections = set(gloo_connections().values())
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] not in connections:
            with socket.socket(fileno=os.dup(int(fd.name))) as duplicate:
                if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    duplicate.shutdown(socket.SHUT_RD)
    time.sleep(40.0)


def test_shutting_gloos_listener_ends_the_process_so_it_must_stay() -> None:
    (ended,) = run_ranks(shut_the_listener, n=1)
    assert isinstance(ended, Ended)
    assert ended == -signal.SIGABRT


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
