"""The sockets that gloo holds in this process, found in /proc, and whether ranks of the pool are at
their other ends.

Runs on engines, in any thread. A gloo event loop is an epoll set with a pipe and a *listening* TCP
socket in it and without an eventfd, which the loops of libuv, zmq and asyncio have. Its other
sockets are its connections.

gloo's listener takes whoever connects first with the right number, and the numbers are 0, 1, 2 ...
(gloo/transport/tcp/listener.cc). So when a group is connected, and before anything is sent in it,
each member says in the store between which addresses its connections go, signed with the pool's
key; each end that no other member has claimed is a stranger's. Whoever can write to the store (on
one host nobody else can) may keep a group from being formed, or mix its ranks up, but has no place
in it. A connection is proved once: those of other groups lead to ranks that are no members.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gpupool.engine.process import this_rank

Ends = tuple[str, str]  # here and there, as "10.0.0.1:4711"

_LISTENS = (socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
_MANY_BYTES = 1 << 16
_SIGNATURE_CHARS = 64  # HMAC-SHA256, in hexadecimal digits
_proved: set[tuple[int, Ends]] = set()  # with the inode of the socket


@contextlib.contextmanager
def gloo_connections() -> Iterator[Sequence[socket.socket]]:
    """Duplicates of every connection that gloo holds in this process: it may close its own at any
    moment. None where /proc does not show them."""
    connections: list[socket.socket] = []
    with contextlib.ExitStack() as held:
        for fd in os.listdir("/proc/self/fd"):
            targets = {watched: _target(watched) for watched in _watched(fd)}
            kinds = " ".join(targets.values())
            if "eventfd" in kinds or "pipe:" not in kinds:
                continue
            found = [_duplicate(*one) for one in targets.items() if "socket:" in one[1]]
            sockets = [held.enter_context(one) for one in found if one is not None]
            connected = [one for one in sockets if not one.getsockopt(*_LISTENS)]
            if connected != sockets:
                connections += connected
        yield connections


def _target(fd: int | str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # closed meanwhile
        return ""


def _watched(fd: str) -> list[str]:
    """The descriptors that an epoll set watches; none for anything else."""
    try:
        info = Path(f"/proc/self/fdinfo/{fd}").read_text()
    except OSError:  # closed meanwhile
        return []
    return re.findall(r"^tfd:\s*(\d+)", info, re.MULTILINE)


def _duplicate(fd: str, target: str) -> socket.socket | None:
    """Of a socket; None if the number is another one's by now."""
    try:
        duplicate = socket.socket(fileno=os.dup(int(fd)))
    except OSError:
        return None
    if _target(duplicate.fileno()) == target:
        return duplicate
    duplicate.close()
    return None


def shut_connections_to(address: str) -> None:
    """Have whoever waits for an answer of this server get an error."""
    for fd in os.listdir("/proc/self/fd"):
        target = _target(fd)
        one = _duplicate(fd, target) if target.startswith("socket:") else None
        if one is not None:
            with one, contextlib.suppress(OSError):
                if ends_of(one)[1] == address:
                    one.shutdown(socket.SHUT_RDWR)


def ends_of(connection: socket.socket) -> Ends:
    """Both ends, or an OSError if it is over. An address of IPv4 is the same in IPv6, which torch's
    store has."""
    pair = connection.getsockname(), connection.getpeername()
    here, there = (":".join(map(str, end[:2])).removeprefix("::ffff:") for end in pair)
    return here, there


# ---- strangers -------------------------------------------------------------------------------


def claim(key: str) -> str:
    """What this process says of its connections: a signature, and the ends."""
    with gloo_connections() as connections:
        text = json.dumps([ends_of(one) for one in connections if not is_over(one)])
    return _signature(key, text) + text


def refuse_unclaimed(key: str, claims: Iterable[str]) -> None:
    """Shut the connections whose other ends are in none of the `claims` that are signed with `key`.

    Raises:
        RuntimeError: there was one. It names the address.
    """
    __tracebackhide__ = True  # not the user's
    claimed: set[Ends] = set()
    for said in claims:
        text = said[_SIGNATURE_CHARS:]
        true = _signature(key, text) + text
        if hmac.compare_digest(true.encode(), said.encode()):
            claimed |= {(here, there) for there, here in json.loads(text)}
    with gloo_connections() as connections:
        live = [one for one in connections if not is_over(one)]
        marks = {one: (os.fstat(one.fileno()).st_ino, ends_of(one)) for one in live}
        known = {one for one in live if marks[one] in _proved or marks[one][1] in claimed}
        strange = {one: marks[one][1][1] for one in live if one not in known}
        for one in strange:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
                # leave nothing in it that a later group could read: it is over
                while one.recv(_MANY_BYTES, socket.MSG_DONTWAIT):
                    pass
        _proved.clear()
        _proved.update(marks[one] for one in known)
    if strange:
        raise RuntimeError(
            f"{' and '.join(strange.values())}, at the other end of a connection of a process "
            f"group (gloo) on {this_rank().host or socket.gethostname()}, is no rank of this pool, "
            "and was shut out: a stranger on the machine or the network, or a NAT between the "
            "hosts, over which no pool can be."
        )


def is_over(connection: socket.socket) -> bool:
    """Whether there is nothing to read in a connection, and never will be."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError as error:
        return not isinstance(error, BlockingIOError)


def _signature(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest()
