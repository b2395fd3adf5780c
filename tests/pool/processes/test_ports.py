"""Ports that are chosen before they are bound."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import psutil

from gpupool import Pool
from gpupool.pool.processes.ports import free_ports
from tests.support.processes import family


def first_given_away() -> int:
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_a_block_in_which_somebody_listens_is_left_out() -> None:
    taken: set[int] = set()
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            chosen = free_ports(3000)
            assert not taken.intersection(chosen)
            if not chosen:
                break
            assert chosen == list(range(chosen[0], chosen[0] + 3000))
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", chosen[1500]))
            taken.add(chosen[1500])
    assert chosen == []


def test_the_controller_listens_at_such_ports_alone(pool2: Pool) -> None:
    held = family(pool2)["controller"].net_connections("tcp")
    listening = [one.laddr.port for one in held if one.status == psutil.CONN_LISTEN]
    assert len(listening) >= 14
    assert all(10_000 <= port < first_given_away() for port in listening)
