"""Ports of loopback that nothing takes by accident. Runs on the client.

Who asks the kernel for a free port, lets it go and binds it later can lose it in between: the
kernel gives ports of the same range to every outgoing connection of the machine. So these here
lie below that range.
"""

from __future__ import annotations

import random
import socket
from itertools import islice
from pathlib import Path

_LOWEST = 10_000  # below are the well-known services
_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux; elsewhere 49152 and up


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens at now: `number` of them, fewer where hardly any is free."""
    below = range(_LOWEST, _first_given_away())
    # Not the random numbers that the user has seeded: two notebooks would choose the same.
    drawn = random.SystemRandom().sample(below, min(len(below), 20 * number))
    return list(islice(filter(_is_free, drawn), number))


def free_port() -> int:
    """A port that nobody listens at now."""
    for port in free_ports(1):
        return port
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _first_given_away() -> int:
    try:
        return int(_GIVEN_AWAY.read_text().split()[0])
    except OSError:  # another system
        return 49152


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
