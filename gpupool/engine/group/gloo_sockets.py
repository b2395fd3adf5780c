"""The sockets that gloo holds in this process, found in /proc. Runs on engines, in any thread.

A gloo event loop is an epoll set with a pipe and a *listening* TCP socket in it and without an
eventfd, which the loops of libuv, zmq and asyncio have. Its other sockets are its connections.
Each process group on gloo has a loop of its own. `tests/engine/group/test_facts.py` guards these
facts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FDS = "/proc/self/fd"
_EPOLL_CTL_MOD = 3  # epoll_ctl(2)
_BACKLOG = 4096  # the kernel takes less if it allows less
_MOST_WAITING = 64  # of which the kernel lets one wait or two


@dataclass(frozen=True, slots=True)
class Listener:
    """The listening socket of a gloo event loop, which names the loop for as long as it exists.

    `epoll` is the descriptor of the loop's epoll set.
    """

    fd: int
    inode: str
    epoll: int

    @property
    def port(self) -> int:
        """Where it listens; 0 if it was closed meanwhile."""
        with _held(self.fd, self.inode) as listener:
            return int(listener.getsockname()[1]) if listener else 0

    def set_deaf(self, deaf: bool) -> None:
        """Have gloo not see who knocks, and the kernel let nobody wait; or take connections again.

        It must not be closed: that ends the process. Connections are not touched. (A filter at the
        socket would drop all that comes, but newer kernels refuse ordinary users those of TCP.)
        """
        with _held(self.fd, self.inode) as listener:
            if listener is None:
                return
            if not deaf:
                with contextlib.suppress(OSError):  # until nobody waits, in vain, from before
                    for _ in range(_MOST_WAITING):
                        listener.accept()[0].close()
            if (entry := _watched(self.epoll).get(self.fd)) is not None:
                _watch(self.epoll, self.fd, 0 if deaf else select.EPOLLIN, entry)
            listener.listen(0 if deaf else _BACKLOG)


def gloo_loops() -> dict[Listener, dict[int, str]]:
    """The event loops of gloo in this process; none where /proc does not show them.

    Listener -> its connections: file descriptor -> inode of the socket.
    """
    loops = {}
    for epoll in _descriptors("anon_inode:[eventpoll]"):
        targets = {fd: _target(fd) for fd in _watched(epoll)}
        kinds = " ".join(targets.values())
        if "eventfd" in kinds or "pipe:" not in kinds:
            continue
        sockets = {fd: text[8:-1] for fd, text in targets.items() if text.startswith("socket:[")}
        listening = {fd: inode for fd, inode in sockets.items() if _listens(fd, inode)}
        for fd, inode in listening.items():
            connections = {fd: one for fd, one in sockets.items() if fd not in listening}
            loops[Listener(fd, inode, epoll)] = connections
    return loops


def gloo_connections() -> dict[int, str]:
    """File descriptor -> socket inode of every connection that gloo holds in this process."""
    return {fd: inode for found in gloo_loops().values() for fd, inode in found.items()}


def ends(fd: int, inode: str) -> tuple[str, str] | None:
    """The local and the remote "address:port" of a connection; None if it is closed."""
    with _held(fd, inode) as connection, contextlib.suppress(OSError):
        if connection:
            local, remote = connection.getsockname(), connection.getpeername()
            return f"{local[0]}:{local[1]}", f"{remote[0]}:{remote[1]}"
    return None


def shut(fd: int, inode: str, how: int) -> bool:
    """Shut a connection, or half of it (shutdown(2)); returns whether it was still there."""
    with _held(fd, inode) as connection, contextlib.suppress(OSError):
        if connection:
            connection.shutdown(how)
            return True
    return False


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


def _watched(epoll: int) -> dict[int, int]:
    """The descriptors of an epoll set, each with what gloo finds it by: a pointer of its own."""
    try:
        info = Path(f"/proc/self/fdinfo/{epoll}").read_text()
    except OSError:  # closed meanwhile
        return {}
    found = re.findall(r"^tfd:\s*(\d+).*?data:\s*([0-9a-f]+)", info, re.MULTILINE)
    return {int(fd): int(data, 16) for fd, data in found}


class _EpollEvent(ctypes.Structure):
    _pack_ = 1 if platform.machine() == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def _watch(epoll: int, fd: int, events: int, data: int) -> None:
    """Have a descriptor of an epoll set report these events. Python's own would change the data."""
    event = _EpollEvent(events, data)
    if ctypes.CDLL(None, use_errno=True).epoll_ctl(epoll, _EPOLL_CTL_MOD, fd, ctypes.byref(event)):
        raise OSError(ctypes.get_errno(), "epoll_ctl")
