"""Ports that are chosen before they are bound."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import psutil

from gpupool import Pool
from gpupool.pool.processes.ports import Ports
from tests.support.processes import family


def first_given_away() -> int:
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_no_two_have_the_same_and_the_kernel_gives_none_of_them_away() -> None:
    several = [Ports(21) for _ in range(50)]
    ports = [port for one in several for port in one.ports]
    assert len(set(ports)) == 50 * 21
    assert all(10_000 <= port < first_given_away() for port in ports)
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
    for one in several:
        one.close()


def test_a_block_in_which_somebody_listens_is_left_out() -> None:
    taken: set[int] = set()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            chosen = Ports(3000)  # of 7 such blocks
            chosen.close()
            assert not taken.intersection(chosen.ports)
            if not chosen.ports:
                break
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", chosen.ports[1500]))
            taken.add(chosen.ports[1500])
    assert chosen.ports == []


def test_the_controller_listens_at_such_ports_alone(pool2: Pool) -> None:
    held = family(pool2)["controller"].net_connections("tcp")
    listening = [one.laddr.port for one in held if one.status == psutil.CONN_LISTEN]
    assert len(listening) >= 14
    assert all(10_000 <= port < first_given_away() for port in listening)
