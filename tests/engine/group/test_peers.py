"""What gloo is like to strangers, and what `gpupool/engine/group/peers.py` does about them.

On ranks of plain torch, so that a stranger can come at exactly the wrong moment.
`tests/security/` has another user attack whole pools.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gpupool.engine.group import peers
from gpupool.engine.group.gloo_sockets import gloo_loops
from gpupool.engine.group.rendezvous import exchange
from tests.engine.group.test_facts import needs_reconfigure
from tests.engine.group.torch_ranks import run_ranks

UID = 12345 if os.getuid() == 0 else os.getuid()  # of nobody that has a name
NUMBERS = range(16)  # gloo counts its connections from 0


def connect_as_stranger(port: int, uid: int, numbers: Sequence[int]) -> int:
    """Have a process of this user connect, and say these numbers, as a rank would; its pid."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        if uid != os.getuid():
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        connections = [socket.socket() for _ in numbers]
        for number, connection in zip(numbers, connections, strict=True):
            connection.connect(("127.0.0.1", port))
            connection.sendall(struct.pack("<q", number))
        os.write(writing, b"x")
        while True:
            signal.pause()
    os.read(reading, 1)
    return pid


def in_store(rank: int, key: str, value: str = "") -> list[str]:
    return exchange(distributed_c10d._get_default_store(), key, rank, 2, value)


def reconfigure(rank: int, number: int) -> str:
    """Connect the group of all ranks; why that has failed, or "" """
    handle = dist._get_reconfigure_handle()  # type: ignore[attr-defined]
    handles = in_store(rank, f"handles{number}", handle)
    try:
        dist._reconfigure(uuid=number, handles=handles).wait()  # type: ignore[attr-defined]
    except RuntimeError as error:
        return str(error)
    return ""


def prove(rank: int, number: int, failed: str) -> int | str:
    """How many connections are proved, or the error."""
    store, names = distributed_c10d._get_default_store(), peers.listeners()
    try:
        return len(peers.prove(store, f"proof{number}", rank, 2, names, failed))
    except peers.UnprovedError as error:
        return str(error)


def taken_by_a_stranger(rank: int, uid: int) -> list[Any]:
    (listener,) = gloo_loops()
    stranger = connect_as_stranger(listener.port, uid, NUMBERS)
    in_store(rank, "the strangers are there")
    try:
        failed = reconfigure(rank, 1)
        return [failed, prove(rank, 1, failed)]
    finally:
        os.kill(stranger, signal.SIGKILL)
        os.waitpid(stranger, 0)


@needs_reconfigure
def test_a_stranger_is_taken_for_a_rank_by_gloo_and_named_by_the_proof() -> None:
    """Both ranks find out, also the one whose own connection is in order."""
    for failed, proof in run_ranks(taken_by_a_stranger, UID, reconfigures=True):
        assert failed == ""  # gloo has noticed nothing
        if os.getuid() == UID:
            assert "a process of this user, connected to the process group" in proof
        else:
            assert proof.startswith(f"the user with uid {UID} connects to ports of this pool on ")
            assert proof.endswith("was shut out. The administrator can end that.")


def knock(place: tuple[str, int]) -> None:
    socket.create_connection(place, timeout=0.3).close()


def a_deaf_group(rank: int, uid: int) -> list[Any]:
    """A group that is made deaf, tried by a stranger, and connected again."""
    names, found = peers.listeners(), [prove(rank, 1, reconfigure(rank, 1))]
    peers.set_deaf(names, True)
    place, num_files = ("127.0.0.1", next(iter(names)).port), len(os.listdir("/proc/self/fd"))
    waiting = socket.create_connection(place)  # the kernel lets one wait, or two
    with pytest.raises(TimeoutError):
        list(map(knock, [place] * 5))
    assert len(os.listdir("/proc/self/fd")) == num_files + 1  # gloo has not taken it
    in_store(rank, "tried")
    peers.set_deaf(names, False)
    with waiting, contextlib.suppress(ConnectionResetError):
        assert waiting.recv(1) == b""
    in_store(rank, "heard")
    began = time.monotonic()
    found.append(prove(rank, 2, reconfigure(rank, 2)))
    assert time.monotonic() - began < 10  # a rank that came too early is heard after a second
    one = torch.ones(1)
    dist.all_reduce(one)
    return [*found, one.item()]


@needs_reconfigure
def test_a_group_is_deaf_between_its_generations() -> None:
    assert run_ranks(a_deaf_group, UID, reconfigures=True) == [[1, 1, 2.0]] * 2


def one_could_not_connect(rank: int) -> int | str:
    return prove(rank, 1, reconfigure(rank, 1) or ("out of luck" if rank else ""))


@needs_reconfigure
def test_all_members_hear_why_one_could_not_connect() -> None:
    assert run_ranks(one_could_not_connect, reconfigures=True) == ["out of luck"] * 2


def with_lazy_init(rank: int) -> int | str:
    return prove(rank, 1, "")


def test_what_cannot_be_found_is_not_proved() -> None:
    for proof in run_ranks(with_lazy_init, TORCH_GLOO_LAZY_INIT="1"):
        assert "of its gloo connections were found in /proc, so that nobody can prove" in str(proof)
