"""The sockets that gloo holds in this process, and whose their other ends are, found in /proc.

Runs on engines, in any thread. A gloo event loop is an epoll set with a pipe and a *listening* TCP
socket in it and without an eventfd, which the loops of libuv, zmq and asyncio have. Its other
sockets are its connections. `tests/engine/group/test_facts.py` guards these facts.

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
from collections.abc import Iterator
from pathlib import Path

_FDS = "/proc/self/fd"
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")  # proc(5): the sockets of all users
_NOBODYS = "0"  # inode of a socket that no process has, or has yet; its user says nothing
_END_CHARS = 13  # "0100007F:1F90" is 127.0.0.1:8080, and ends the same address in IPv6
_ACCEPT_S = 5.0  # a peer takes a connection at once
_POLL_S = 0.002


def gloo_connections() -> dict[int, str]:
    """File descriptor -> socket inode of every connection that gloo holds in this process.

    There are none where /proc does not show them.
    """
    found = {}
    for epoll in _descriptors("anon_inode:[eventpoll]"):
        targets = {fd: _target(fd) for fd in _watched(epoll)}
        kinds = " ".join(targets.values())
        if "eventfd" in kinds or "pipe:" not in kinds:
            continue
        sockets = {fd: text[8:-1] for fd, text in targets.items() if text.startswith("socket:[")}
        listening = {fd for fd, inode in sockets.items() if _listens(fd, inode)}
        if listening:
            found.update({fd: one for fd, one in sockets.items() if fd not in listening})
    return found


def shut(fd: int, inode: str, how: int) -> bool:
    """Shut a connection, or half of it (shutdown(2)); returns whether it was still there."""
    with _held(fd, inode) as connection, contextlib.suppress(OSError):
        if connection:
            connection.shutdown(how)
            return True
    return False


def refuse_strangers() -> bool:
    """Shut the connections of gloo that do not lead to a process of this user.

    Returns:
        Whether /proc shows any, and whose they are. Where it does not, nothing is refused.

    Raises:
        RuntimeError: there was one. It names the other user.
    """
    __tracebackhide__ = True  # not the user's
    if not os.access(_TABLES[0], os.R_OK):
        return False
    deadline = time.monotonic() + _ACCEPT_S
    while True:
        owners = _owners()
        strange = {one: uid for one, uid in owners.items() if uid != os.geteuid()}
        users = {uid for uid in strange.values() if uid is not None}
        if users or not strange or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    for fd, inode in strange:
        shut(fd, inode, socket.SHUT_RDWR)
    if strange:
        named = " and ".join(map(_user_name, sorted(users))) or "somebody who cannot be named"
        raise RuntimeError(
            f"{named} has connected to a process group (gloo) of this pool on "
            f"{socket.gethostname()} while it was formed, and was shut out. The administrator can "
            "end that."
        )
    return bool(owners)


def _owners() -> dict[tuple[int, str], int | None]:
    """Connection of gloo (file descriptor, inode) -> uid of who holds its other end.

    None: nobody has taken it yet, or nobody holds it any more. Those are left out of which nothing
    can come: gloo keeps who has hung up without a word.
    """
    connections = [one for one in gloo_connections().items() if not _is_over(*one)]
    other_ends: dict[str, tuple[str, str]] = {}
    uids: dict[tuple[str, str], int] = {}
    found: dict[tuple[int, str], int | None] = {}
    for table in _TABLES if connections else ():
        for row in _rows(table):
            local, remote, uid, inode = row[1][-_END_CHARS:], row[2][-_END_CHARS:], row[7], row[9]
            other_ends[inode] = remote, local
            if inode != _NOBODYS:
                uids[local, remote] = int(uid)
        found = {one: uids.get(other_ends.get(one[1], ("", ""))) for one in connections}
        if None not in found.values():  # each table takes the kernel 5 ms
            break
    return found


def _is_over(fd: int, inode: str) -> bool:
    """Whether there is nothing to read in a connection, and never will be."""
    with _held(fd, inode) as connection:
        try:
            peeked = connection and connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError as error:
            return not isinstance(error, BlockingIOError)
        return not peeked


def _rows(table: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(table).read_text().splitlines()[1:]]
    except FileNotFoundError:  # a machine without IPv6
        return []


def _user_name(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"the user with uid {uid}"


@contextlib.contextmanager
def _held(fd: int, inode: str) -> Iterator[socket.socket | None]:
    """A duplicate of a socket, as another's descriptor gets closed; None if it has been."""
    try:
        duplicate = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=os.dup(fd))
    except OSError:
        yield None
        return
    with duplicate:  # the number may be another socket's by now
        yield duplicate if _target(duplicate.fileno()) == f"socket:[{inode}]" else None


def _listens(fd: int, inode: str) -> bool:
    with _held(fd, inode) as one:
        return bool(one and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _descriptors(target: str) -> list[int]:
    if not os.path.exists(_FDS):  # not Linux: nothing is found, and nothing can be freed
        return []
    return [int(fd) for fd in os.listdir(_FDS) if _target(int(fd)) == target]


def _target(fd: int) -> str:
    try:
        return os.readlink(f"{_FDS}/{fd}")
    except OSError:  # closed meanwhile
        return ""


def _watched(epoll: int) -> list[int]:
    """The descriptors of an epoll set."""
    try:
        info = Path(f"/proc/self/fdinfo/{epoll}").read_text()
    except OSError:  # closed meanwhile
        return []
    return [int(fd) for fd in re.findall(r"^tfd:\s*(\d+)", info, re.MULTILINE)]
