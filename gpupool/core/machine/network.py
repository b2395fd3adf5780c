"""At which addresses hosts reach each other: found by trying. Standard library and psutil.

`listen` and `reach` run on hosts, `choose` on the client. For a connection to be made nobody has to
accept it: the kernel completes it, and nothing is read or sent.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil

from gpupool.core.errors import PoolStartError

Listened = Sequence[tuple[str, str, int]]  # interface, address, port
_TIMEOUT_S = 2.0
# Bridges and ends of containers and virtual machines: other hosts have the same addresses there.
_OF_CONTAINERS = re.compile("docker|podman|lxc|virbr|veth|br-|cni|flannel|cali|vxlan|tunl")


def listen(network: str = "") -> tuple[list[socket.socket], list[tuple[str, str, int]]]:
    """Listen at each IPv4 address of this machine that other hosts may reach.

    Private networks come before the internet, and fast ones before slow ones. Where there is no
    such address, loopback is listened at: hosts may be parts of one machine. The kernel chooses the
    port, as it does for gloo and NCCL: so a firewall before these is met here.

    `network`, as "10.1.0.0/16": the addresses in it, whatever they are, and no others.
    """
    stats, found = psutil.net_if_stats(), dict[str, ipaddress.IPv4Address]()
    for name, known in psutil.net_if_addrs().items():
        addresses = [one.address for one in known if one.family == socket.AF_INET]
        if addresses and name in stats and stats[name].isup:
            found[name] = ipaddress.IPv4Address(addresses[0])  # gloo and NCCL take the first one
    inner = {name for name, at in found.items() if at.is_loopback}
    others = {name for name, at in found.items() if at.is_link_local or _OF_CONTAINERS.match(name)}
    names = [*(found.keys() - inner - others or inner)]
    if network:
        wanted = ipaddress.ip_network(network, strict=False)
        names = [name for name, at in found.items() if at in wanted]
    names.sort(key=lambda name: (found[name].is_global, -stats[name].speed, name))
    listeners, listened = list[socket.socket](), list[tuple[str, str, int]]()
    for name in names:
        with contextlib.suppress(OSError):  # the interface has gone
            listeners.append(socket.create_server((str(found[name]), 0)))
            listened.append((name, *listeners[-1].getsockname()))
    return listeners, listened


def reach(targets: Mapping[str, Listened]) -> dict[str, dict[str, str]]:
    """Try to connect to where hosts listen: host -> address -> why, of those that fail."""

    failed: dict[str, dict[str, str]] = {}

    def connect(place: tuple[str, str, int]) -> None:
        host, address, port = place
        try:
            socket.create_connection((address, port), _TIMEOUT_S).close()
        except OSError as error:
            failed.setdefault(host, {})[address] = (error.strerror or str(error)).lower()

    places = [(host, address, port) for host, at in targets.items() for _, address, port in at]
    with ThreadPoolExecutor(len(places) or 1) as threads:
        list(threads.map(connect, places))
    return failed


def choose(
    listening: Mapping[str, Listened], failed: Mapping[str, Mapping[str, Mapping[str, str]]]
) -> dict[str, tuple[str, str]]:
    """For each host the first address that all others reach: (interface, address). `failed`: host
    that has tried -> `reach`'s answer. A PoolStartError if there is none."""
    chosen: dict[str, tuple[str, str]] = {}
    for host, at in listening.items():
        whys = []
        for interface, address, _ in at:
            blocked = [one for one, answer in failed.items() if address in answer.get(host, {})]
            if not blocked:
                chosen[host] = interface, address
                break
            why = failed[blocked[0]][host][address]
            whys.append(f"{blocked[0]} cannot reach {host} at {address}: {why}")
        else:
            listed = "; ".join(whys) or f"{host} has no IPv4 address for other hosts"
            raise PoolStartError(
                f"{listed}. A firewall? Hosts of a pool, and the notebook's machine, connect to "
                "any port of each other; `network=` in gpupool.toml chooses another network."
            )
    return chosen
