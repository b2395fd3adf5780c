"""Ports of loopback that are chosen before they are listened at. Runs on the client.

Who asks the kernel for a free port, closes it and binds it later can lose it in between: the
kernel gives ports of the same range to every outgoing connection of the machine. So these lie
below that range, at random.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10_000  # below are the well-known services
_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")
_NUM_TRIED = 100  # blocks


def free_ports(number: int) -> list[int]:
    """So many ports in a row that nobody listens at now; none where hardly any is free."""
    end = int(_GIVEN_AWAY.read_text().split()[0])
    starts = range(_LOWEST, end - number + 1)
    # Not the random numbers that the user has seeded: two notebooks would choose the same.
    for start in random.SystemRandom().sample(starts, min(len(starts), _NUM_TRIED)):
        if all(map(_is_free, range(start, start + number))):
            return list(range(start, start + number))
    return []


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
