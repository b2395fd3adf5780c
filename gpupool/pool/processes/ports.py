"""Ports of loopback that nothing else takes before they are listened at. Runs on the client.

Who asks the kernel for a free port, closes it and binds it later can lose it in between: the
kernel gives ports of the same range to every outgoing connection of the machine. So these lie
below that range, and pools that start at the same time keep off each other's. Measured with two
pools that start at once, where the kernel has 500 ports to give: of 80 starts with ports that it
chose 6 failed, half of them only after their time limit; of 40 with these ports none.
"""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

_LOWEST = 10_000  # below are the well-known services
_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux; elsewhere 49152 and up
_TRIED = 100  # blocks


class Ports:
    """`ports`: so many in a row that nobody listens at; none where hardly any is free.

    No other `Ports` of this machine has them until `close`. All ask for the same number, so that
    blocks are the same or do not overlap.
    """

    def __init__(self, number: int) -> None:
        self.ports: list[int] = []
        self._held: socket.socket | None = None
        for block in _blocks(number):
            held = _hold(block)
            if held is not None and all(map(_is_free, block)):
                self.ports, self._held = list(block), held
                return
            if held is not None:
                held.close()

    def close(self) -> None:
        """Others may have the ports."""
        if self._held is not None:
            self._held.close()


def any_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _blocks(number: int) -> Iterator[range]:
    """Some of the blocks of so many ports, in an order that differs from process to process."""
    first_given_away = _first_given_away()
    starts = range(_LOWEST, first_given_away - number + 1, number)
    # Not the random numbers that the user has seeded: two notebooks would choose the same.
    for start in random.SystemRandom().sample(starts, min(len(starts), _TRIED)):
        yield range(start, start + number)


def _hold(block: range) -> socket.socket | None:
    """What says to other pools that a block is taken; the kernel frees it with this process.

    A socket's name that is no file is known in the same network namespace as the ports are.
    """
    held = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            held.bind(f"\0gpupool.ports.{block.start}.{len(block)}")
        except OSError:
            held.close()
            return None
    return held


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
