"""Ports that are chosen before they are bound."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import psutil

from gpupool import Pool
from gpupool.pool.ports import free_port, free_ports
from tests.pool.processes import family


def test_they_are_free_and_none_that_the_kernel_gives_away() -> None:
    ports = free_ports(20)
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 20
    assert all(10_000 <= port < first for port in ports)
    with contextlib.ExitStack() as stack:
        for port in [*ports, free_port()]:
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))


def test_the_controller_listens_at_such_ports_alone(pool2: Pool) -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    held = family(pool2)["controller"].net_connections("tcp")
    listening = [one.laddr.port for one in held if one.status == psutil.CONN_LISTEN]
    assert len(listening) >= 14
    assert all(10_000 <= port < first for port in listening)
