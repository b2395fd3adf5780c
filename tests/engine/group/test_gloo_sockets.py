"""Who connects to gloo's ports: `gpupool/engine/group/gloo_sockets.py`, on ranks of plain torch.

`tests/security/` has another user attack whole pools.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from gpupool.engine.group.gloo_sockets import gloo_connections, refuse_strangers
from tests.engine.group.torch_ranks import run_ranks
from tests.support.processes import until

NOBODY = 65534
IS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


def listeners() -> set[tuple[str, int]]:
    """Where this process listens: gloo's, and those of stores."""
    found = psutil.Process().net_connections(kind="tcp")
    return {(*one.laddr,) for one in found if one.status == psutil.CONN_LISTEN}


def knock(port: int, address: str, uid: int) -> int:
    """Have a process of this user connect, and say nothing; its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(uid)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family) as knocking:
                knocking.connect((address, port))
                time.sleep(60)
        finally:
            os._exit(0)
    return pid


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def num_connections() -> int:
    with gloo_connections() as connections:
        return len(connections)


def with_guests(rank: int, address: str) -> list[Any]:
    """What is said of a guest at rank 0's port who is another user, and a sum."""
    said = ""
    if rank == 0:
        pids = [
            knock(port, address, uid) for _, port in listeners() for uid in (os.getuid(), NOBODY)
        ]
        until(lambda: num_connections() == 3, 10.0, "gloo's taking the connections")
        try:
            refuse_strangers()
        except RuntimeError as error:
            said = str(error)
            refuse_strangers()  # it was shut
        for pid in pids:
            end(pid)
    one = torch.ones(1)
    dist.all_reduce(one)
    return [said, one.item()]


@IS_ROOT
@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_another_user_is_shut_out_and_named_and_nobody_else_is(address: str) -> None:
    (said, total), _ = run_ranks(with_guests, address)
    assert f"(uid {NOBODY}) has connected" in said
    assert total == 2.0
