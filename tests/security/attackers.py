"""What another user tries: `python -m tests.security.attackers NAME UID`, as that user.

All that is known of the victim is its number, UID, and with it what /proc/net/tcp tells everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from tests.security.lines import serve

_LISTEN = b" 0A "
_TCP = Path("/proc/net/tcp")
_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")  # gloo's listeners have such ports
_DONE = zmq.EVENT_HANDSHAKE_SUCCEEDED
_SETTLED = (
    _DONE
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED  # by who takes no such socket
    | zmq.EVENT_CONNECT_RETRIED  # nobody has opened
)
_HANDSHAKE_MS = 2000  # who has not answered by then does not speak ZMQ
_KNOCK_S = 0.1  # then it tries anew
_NUMBERS = 16  # of gloo's connections, from 0 on


@dataclass
class Report:
    looked: int = 0  # how often, for ports
    heard: Counter[int] = field(default_factory=Counter)  # messages by port
    admitted: dict[int, bool] = field(default_factory=dict)  # port -> whether, once that is clear
    knocked: int = 0  # connections that were begun
    read: list[str] = field(default_factory=list)  # what the victim has sent in them


report = Report()


async def watch(
    uid: int,
    attack: Callable[[int, int], Awaitable[None]],
    numbers: range,
    lowest: int = 0,
    every_s: float = 0.0,
) -> None:
    """Attack each port that the user listens at, also those that come later, again and again.

    That is for every number one attack at a time. Ports below the lowest are left alone.
    """
    attacks: dict[tuple[int, int], asyncio.Future[None]] = {}
    while True:
        rows = (line.split() for line in _TCP.read_bytes().splitlines() if line[33:37] == _LISTEN)
        ports = {int(row[1][-4:], 16) for row in rows if int(row[7]) == uid}
        for place in itertools.product([port for port in ports if port >= lowest], numbers):
            if place not in attacks or attacks[place].done():
                attacks[place] = asyncio.ensure_future(attack(*place))
        report.looked += 1
        await asyncio.sleep(every_s)


async def subscribe(port: int, _: int) -> None:
    subscriber = zmq.asyncio.Context.instance().socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    subscriber.setsockopt(zmq.CONNECT_TIMEOUT, _HANDSHAKE_MS)
    subscriber.setsockopt(zmq.RECONNECT_IVL, 1000)
    monitor = subscriber.get_monitor_socket(_SETTLED)
    subscriber.connect(f"tcp://127.0.0.1:{port}")

    async def settle() -> None:
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            report.admitted[port] = report.admitted.get(port, False) or event == _DONE

    async def hear() -> None:
        while True:
            await subscriber.recv_multipart()
            report.heard[port] += 1

    await asyncio.gather(settle(), hear())


async def knock(port: int, number: int) -> None:
    """Connect before the true peer of gloo does, and be that number until one is thrown out.

    Who sends nothing to a peer does not read what that has sent either: gloo answers each message
    that comes.
    """
    report.knocked += 1
    loop, until_s = asyncio.get_running_loop(), _KNOCK_S + _KNOCK_S * number / _NUMBERS
    with contextlib.suppress(OSError), socket.socket() as one:
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
        # each at a time of its own, so that one comes soon after a door is opened
        async with asyncio.timeout(until_s):
            await loop.sock_sendall(one, struct.pack("<q", number))  # at once, where one may
        while data := await loop.sock_recv(one, 1 << 16):
            report.read.append(repr(data[:200]))
            await loop.sock_sendall(one, data)  # as good an answer as any


if __name__ == "__main__":
    name, uid = sys.argv[1], int(sys.argv[2])
    attack: tuple[Any, ...] = subscribe, range(1), 0, 0.1
    if name == "hijacker":
        attack = knock, range(_NUMBERS), int(_GIVEN_AWAY.read_text().split()[0])
    threading.Thread(target=lambda: asyncio.run(watch(uid, *attack)), daemon=True).start()
    serve({"report": lambda: vars(report)})
