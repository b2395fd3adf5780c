"""The sockets that gloo holds in this process, and whose their other ends are, found in /proc.

Runs on engines, in any thread. A gloo event loop is an epoll set with a pipe and a *listening* TCP
socket in it and without an eventfd, which the loops of libuv, zmq and asyncio have. Its other
sockets are its connections.

gloo's listener takes whoever of this machine's users connects first with the right number, and the
numbers are 0, 1, 2 ... (gloo/transport/tcp/listener.cc). So after a group is connected, and before
anything is sent in it, each rank looks whose the other ends of its connections are. Who holds one
that a stranger has made sees it by itself.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

Ends = tuple[str, str]  # here and there, as "10.0.0.1:4711"

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")  # proc(5): the sockets of all users
_NOBODYS = "0"  # inode of a socket that no process has, or has yet; its user says nothing
_END_CHARS = 13  # "0100007F:1F90" is 127.0.0.1:8080, and ends the same address in IPv6
_LISTENS = (socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
_ACCEPT_S = 5.0  # a peer takes a connection at once
_POLL_S = 0.002
_MANY_BYTES = 1 << 16


@contextlib.contextmanager
def gloo_connections() -> Iterator[Sequence[socket.socket]]:
    """Every connection that gloo holds in this process; none where /proc does not show them.

    They are duplicates, closed at the end: gloo may close its own at any moment.
    """
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


def refuse_strangers() -> None:
    """Shut the connections of gloo that do not lead to a process of this user.

    Where /proc does not show whose they are, nothing is refused.

    Raises:
        RuntimeError: there was one. It names the other user.
    """
    __tracebackhide__ = True  # not the user's
    deadline = time.monotonic() + _ACCEPT_S
    while True:
        with gloo_connections() as connections:
            strange = {one: uid for one, uid in _owners(connections) if uid != os.geteuid()}
            users = {uid for uid in strange.values() if uid is not None}
            if not strange:
                return
            if users or time.monotonic() > deadline:
                shut_out(strange)
                break
        time.sleep(_POLL_S)
    named = " and ".join(map(_user_name, sorted(users))) or "somebody who cannot be named"
    raise RuntimeError(
        f"{named} has connected to a process group (gloo) of this pool on {socket.gethostname()} "
        "while it was formed, and was shut out. The administrator can end that."
    )


def shut_out(strangers: Iterable[socket.socket]) -> None:
    """Shut connections, and leave nothing in them that a later group could read: they are over."""
    for one in strangers:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
            while one.recv(_MANY_BYTES, socket.MSG_DONTWAIT):
                pass


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
    """Both ends; in IPv6, which is for torch's store the rule, an address of IPv4 is the same.

    Raises:
        OSError: the connection is over.
    """
    pair = connection.getsockname(), connection.getpeername()
    here, there = (":".join(map(str, end[:2])).removeprefix("::ffff:") for end in pair)
    return here, there


def _owners(connections: Sequence[socket.socket]) -> list[tuple[socket.socket, int | None]]:
    """Connections, each with the uid of who holds its other end.

    None: nobody has taken it yet, or nobody holds it any more. Those are left out of which nothing
    can come: gloo keeps who has hung up without a word.
    """
    inodes = {one: str(os.fstat(one.fileno()).st_ino) for one in connections if not is_over(one)}
    other_ends: dict[str, tuple[str, str]] = {}
    uids: dict[tuple[str, str], int] = {}
    found: list[tuple[socket.socket, int | None]] = []
    for table in filter(os.path.exists, _TABLES if inodes else ()):
        for line in Path(table).read_text().splitlines()[1:]:
            row = line.split()
            local, remote, uid, inode = row[1][-_END_CHARS:], row[2][-_END_CHARS:], row[7], row[9]
            other_ends[inode] = remote, local
            if inode != _NOBODYS:
                uids[local, remote] = int(uid)
        found = [(one, uids.get(other_ends.get(own, ("", "")))) for one, own in inodes.items()]
        if all(uid is not None for _, uid in found):  # each table takes the kernel 5 ms
            break
    return found


def is_over(connection: socket.socket) -> bool:
    """Whether there is nothing to read in a connection, and never will be."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError as error:
        return not isinstance(error, BlockingIOError)


def _user_name(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"the user with uid {uid}"
