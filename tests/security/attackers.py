"""What another user tries: `python -m tests.security.attackers NAME UID`, as that user.

All that is known of the victim is its number, UID, and with it what /proc/net/tcp tells everybody.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

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


def ports_of(uid: int) -> set[int]:
    """The ports that a user listens at, as everybody may know."""
    rows = (line.split() for line in _TCP.read_bytes().splitlines() if line[33:37] == _LISTEN)
    return {int(row[1][-4:], 16) for row in rows if int(row[7]) == uid}


# ---- ZMQ --------------------------------------------------------------------------------------


class Sniffer(threading.Thread):
    """Subscribes to everything on each port, also on those that come later.

    `heard` counts messages by port. `settled` are the ports where it is clear whether it is let in,
    `admitted` those where it is.
    """

    def __init__(self, uid: int) -> None:
        super().__init__(daemon=True)
        self.heard: Counter[int] = Counter()
        self.settled: set[int] = set()
        self.admitted: set[int] = set()
        self._uid = uid
        self.start()

    def report(self) -> dict[str, Any]:
        """What it has come to."""
        settled, admitted = sorted(self.settled), sorted(self.admitted)
        return {"heard": self.heard, "settled": settled, "admitted": admitted}

    def run(self) -> None:
        """Until the process ends."""
        context, poller = zmq.Context(), zmq.Poller()
        ports: dict[zmq.Socket[bytes], int] = {}
        monitors: dict[zmq.Socket[bytes], int] = {}
        while True:
            for port in ports_of(self._uid) - set(ports.values()):
                subscriber = context.socket(zmq.SUB)
                subscriber.setsockopt(zmq.SUBSCRIBE, b"")
                subscriber.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
                subscriber.setsockopt(zmq.CONNECT_TIMEOUT, _HANDSHAKE_MS)
                subscriber.setsockopt(zmq.RECONNECT_IVL, 1000)
                monitor = subscriber.get_monitor_socket(_SETTLED)
                subscriber.connect(f"tcp://127.0.0.1:{port}")
                ports[subscriber], monitors[monitor] = port, port
                poller.register(subscriber, zmq.POLLIN)
                poller.register(monitor, zmq.POLLIN)
            for ready, _ in poller.poll(100):
                parts = ready.recv_multipart()
                if ready not in monitors:
                    self.heard[ports[ready]] += 1
                    continue
                self.settled.add(monitors[ready])
                if parse_monitor_message(parts)["event"] == _DONE:
                    self.admitted.add(monitors[ready])


# ---- gloo --------------------------------------------------------------------------------------


@dataclass
class _Knock:
    """A connection to a port, with the number of a rank's; it is `open` when somebody answers."""

    socket: socket.socket
    place: tuple[int, int]  # port, number
    until: float  # then it is tried anew, if nobody has opened
    open: bool = False


class Hijacker(threading.Thread):
    """Connects to each listener before the true peer does, and takes the place of each number.

    It knocks again and again where nobody opens, and where it was thrown out; `read` has what the
    victim has sent. Who sends nothing to a peer does not read what that has sent either: gloo
    answers each message that comes.
    """

    def __init__(self, uid: int) -> None:
        super().__init__(daemon=True)
        self.read: list[str] = []
        self.knocked = 0  # connections that it has begun
        self.looked = 0
        self._uid = uid
        self._low = int(_GIVEN_AWAY.read_text().split()[0])
        self._poll = select.epoll()
        self._knocks: dict[int, _Knock] = {}  # by file descriptor
        self._places: dict[tuple[int, int], int] = {}  # port, number -> file descriptor
        self.start()

    def run(self) -> None:
        """Until the process ends."""
        while True:
            for port in ports_of(self._uid):
                for number in range(_NUMBERS) if port >= self._low else ():
                    self._knock((port, number))
            self.looked += 1
            for fd, event in self._poll.poll(0):
                knock = self._knocks[fd]
                try:
                    if knock.open:
                        data = knock.socket.recv(1 << 16)
                        if not data:
                            raise ConnectionError
                        self.read.append(repr(data[:200]))
                        knock.socket.sendall(data)  # as good an answer as any
                    elif event & select.EPOLLOUT:
                        knock.socket.sendall(struct.pack("<q", knock.place[1]))
                        knock.open = True
                        self._poll.modify(fd, select.EPOLLIN)
                except OSError:
                    self._knocks.pop(fd).socket.close()

    def _knock(self, place: tuple[int, int]) -> None:
        now, fd = time.monotonic(), self._places.get(place, -1)
        if knock := self._knocks.get(fd):
            if knock.open or now < knock.until:
                return
            self._knocks.pop(fd).socket.close()
        one = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            one.connect(("127.0.0.1", place[0]))
        self.knocked += 1
        # each at a time of its own, so that one comes soon after a door is opened
        until = now + _KNOCK_S + _KNOCK_S * place[1] / _NUMBERS
        self._knocks[one.fileno()] = _Knock(one, place, until)
        self._places[place] = one.fileno()
        self._poll.register(one.fileno(), select.EPOLLOUT)


if __name__ == "__main__":
    uid = int(sys.argv[2])
    if sys.argv[1] == "sniffer":
        one = Sniffer(uid)
        serve({"report": one.report})
    else:
        other = Hijacker(uid)
        serve({"report": lambda: {n: getattr(other, n) for n in ("looked", "knocked", "read")}})
