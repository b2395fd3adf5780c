"""At which addresses hosts reach each other: found by trying. Standard library and psutil.

`listen` and `reach` run on hosts, `choose` on the client. For a connection to be made nobody has to
accept it: the kernel completes it, and nothing is read or sent.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import selectors
import socket
import time
from collections.abc import Mapping, Sequence

import psutil

from gpupool.core.errors import PoolStartError

Listened = Sequence[tuple[str, str, int]]  # interface, address, port

_BACKLOG = 128  # hosts that may try at one time
# Bridges and ends of containers and virtual machines: other hosts have the same addresses there.
_OF_CONTAINERS = re.compile("docker|podman|lxc|virbr|veth|br-|cni|flannel|cali|vxlan|tunl")


def listen(
    network: str = "", ports: Sequence[int] = (0,)
) -> tuple[list[socket.socket], list[tuple[str, str, int]]]:
    """Listen at each IPv4 address of this machine that other hosts may reach: (interface, address,
    port).

    Private networks come before the internet, and fast ones before slow ones. Where there is no
    such address, loopback is listened at: hosts may be parts of one machine.

    Args:
        network: as "10.1.0.0/16": the addresses in it, whatever they are, and no others.
        ports: at one of which to listen. By default the kernel chooses, as it does for gloo and
            NCCL: so a firewall before these is met here.
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
        for port in ports:
            with contextlib.suppress(OSError):  # it is in use, or the interface has gone
                listeners.append(socket.create_server((str(found[name]), port), backlog=_BACKLOG))
                listened.append((name, *listeners[-1].getsockname()))
                break
    return listeners, listened


def reach(
    targets: Mapping[str, Sequence[tuple[str, int]]], timeout_s: float = 2.0
) -> dict[str, dict[str, str]]:
    """Try to connect to addresses of other hosts, to all of them at a time.

    Args:
        targets: host -> the (address, port) that it listens at.

    Returns:
        Host -> address -> why, of those that fail: "connection refused", "timed out".
    """
    failed: dict[str, dict[str, str]] = {host: {} for host in targets}
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as held, selectors.DefaultSelector() as selector:
        for host, address, port in ((host, *one) for host, at in targets.items() for one in at):
            trying = held.enter_context(socket.socket())
            trying.setblocking(False)
            error = trying.connect_ex((address, port))
            if error in (0, errno.EINPROGRESS):
                failed[host][address] = "timed out"
                selector.register(trying, selectors.EVENT_WRITE, (trying, host, address))
            else:
                failed[host][address] = os.strerror(error).lower()
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                trying, host, address = key.data
                selector.unregister(trying)
                if error := trying.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failed[host][address] = os.strerror(error).lower()
                else:
                    del failed[host][address]
    return {host: whys for host, whys in failed.items() if whys}


def choose(
    listening: Mapping[str, Listened], failed: Mapping[str, Mapping[str, Mapping[str, str]]]
) -> dict[str, tuple[str, str]]:
    """For each host the first address that all others reach: (interface, address).

    Args:
        listening: host -> where it listens.
        failed: host that has tried -> `reach`'s answer.

    Raises:
        PoolStartError: there is none. It names both hosts, the addresses, and why.
    """
    chosen: dict[str, tuple[str, str]] = {}
    for host, at in listening.items():
        whys = []
        for interface, address, _ in at:
            why = [
                f"{other} cannot reach {host} at {address}: {answer[host][address]}"
                for other, answer in failed.items()
                if address in answer.get(host, {})
            ]
            if not why:
                chosen[host] = interface, address
                break
            whys.append(why[0])
        if host not in chosen:
            listed = "; ".join(whys) or f"{host} has no IPv4 address for other hosts"
            raise PoolStartError(
                f"{listed}. A firewall? Hosts of a pool connect to any port of each other, and to "
                "`ports=` of the notebook's machine; `network=` in gpupool.toml chooses another "
                "network."
            )
    return chosen
