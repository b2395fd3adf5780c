"""What `gpupool/engine/group/peers.py` does about strangers at gloo's ports.

On ranks of plain torch. `tests/security/` has another user attack whole pools.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gpupool.engine.group import peers
from gpupool.engine.group.rendezvous import wait_for_all
from tests.engine.group.torch_ranks import run_ranks


def prove(rank: int, failed: str = "") -> int | str:
    """How many connections are proved, or the error."""
    store, names = distributed_c10d._get_default_store(), peers.listeners()
    try:
        return len(peers.prove(store, "proof", rank, 2, names, failed))
    except peers.UnprovedError as error:
        return str(error)


def knock(place: tuple[str, int]) -> None:
    socket.create_connection(place, timeout=0.3).close()


def a_deaf_group(rank: int) -> list[Any]:
    """A group that is made deaf, tried by a stranger, and used."""
    names, found = peers.listeners(), prove(rank)
    peers.set_deaf(names, True)
    place, num_files = ("127.0.0.1", next(iter(names)).port), len(os.listdir("/proc/self/fd"))
    with socket.create_connection(place):  # the kernel lets one wait, or two
        with pytest.raises(TimeoutError):
            list(map(knock, [place] * 5))
        assert len(os.listdir("/proc/self/fd")) == num_files + 1  # gloo has not taken it
    wait_for_all(distributed_c10d._get_default_store(), "tried", rank, 2)
    one = torch.ones(1)
    dist.all_reduce(one)
    return [found, one.item()]


def test_a_group_that_is_proved_is_deaf_and_works() -> None:
    assert run_ranks(a_deaf_group) == [[1, 2.0]] * 2


def one_could_not_connect(rank: int) -> int | str:
    return prove(rank, "out of luck" if rank else "")


def test_all_members_hear_why_one_could_not_connect() -> None:
    assert run_ranks(one_could_not_connect) == ["out of luck"] * 2


def test_what_cannot_be_found_is_not_proved() -> None:
    for proof in run_ranks(prove, TORCH_GLOO_LAZY_INIT="1"):
        assert "of its gloo connections were found in /proc, so that nobody can prove" in str(proof)
