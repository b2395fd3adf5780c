"""Free this rank from the collective it is blocked in. Runs on engines, in any thread.

No call of torch ends a blocked gloo collective, not even destroying the group: the connections stay
open for as long as a DDP wrapper or a traceback holds the group. Shutting the group's own sockets
does end it, at once, on this rank and on the peers that wait for it, with a RuntimeError. NCCL has
`ProcessGroup.abort`. The group is dead afterwards and has to be formed again (`group.py`).

One in some hundred ranks that begin collectives again and again at that very moment stays blocked:
seen in `UnboundBuffer::waitSend` with every connection closed. By its source gloo loses a send
whose socket is shut just when its event loop has taken it off the list and writes
(`Pair::handleRemotePendingRecv`). Only the receiving half is shut here, so that such writes still
go through, and ranks are interrupted a moment before (`pool/ladder.py`). It still happens, when the
peer's end has gone first; that rank is replaced.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

_LISTEN = "0A"  # the kernel's code for a listening TCP socket in /proc/net/tcp
_FDS = Path("/proc/self/fd")
_NCCL_ABORT_S = 2.0  # what has not returned by then is left to itself: the rank will be replaced


def abort_collectives() -> int:
    """Abort every process group of this rank; tells how many gloo connections were shut.

    Harmless when idle or called again.
    """
    num_shut = sum(_shut(fd, inode) for fd, inode in gloo_connections().items())
    _abort_nccl()
    return num_shut


def _abort_nccl() -> None:
    """Abort every NCCL group, each in a thread of its own: one after the other can deadlock.

    Several communicators of a rank wait for each other's abort on the peers (nccl#1013).
    """

    def abort(group: dist.ProcessGroup) -> None:
        with contextlib.suppress(RuntimeError):  # the main thread may be destroying it
            group.abort()

    backends = dict(distributed_c10d._world.pg_map)
    threads = [
        threading.Thread(target=abort, args=[group], name="gpupool-abort", daemon=True)
        for group, (backend, _) in backends.items()
        if "nccl" in backend
    ]
    deadline = time.monotonic() + _NCCL_ABORT_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def gloo_connections() -> dict[int, str]:
    """File descriptor -> socket inode of every connection that gloo holds in this process.

    A gloo event loop is an epoll set with a pipe and a *listening* TCP socket in it and without an
    eventfd, which the loops of libuv, zmq and asyncio have. Its other sockets are the connections.
    The listener must stay: shutting that ends the process.
    """
    listening = _listening_inodes()
    found: dict[int, str] = {}
    for epoll in _descriptors("anon_inode:[eventpoll]"):
        targets = {fd: _target(fd) for fd in _watched(epoll)}
        sockets = {fd: text[8:-1] for fd, text in targets.items() if text.startswith("socket:[")}
        kinds = " ".join(targets.values())
        if "eventfd" in kinds or "pipe:" not in kinds:
            continue
        if any(inode in listening for inode in sockets.values()):
            found.update({fd: inode for fd, inode in sockets.items() if inode not in listening})
    return found


def _shut(fd: int, inode: str) -> bool:
    """Shut a connection's receiving half; of a duplicate, or another's descriptor gets closed."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
        if _target(duplicate.fileno()) == f"socket:[{inode}]":  # still the same connection
            duplicate.shutdown(socket.SHUT_RD)
            return True
    return False


def _descriptors(target: str) -> list[int]:
    if not _FDS.exists():  # not Linux: nothing is found, and nothing can be freed
        return []
    return [int(fd.name) for fd in _FDS.iterdir() if _target(int(fd.name)) == target]


def _target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # closed meanwhile
        return ""


def _watched(epoll: int) -> list[int]:
    try:
        info = Path(f"/proc/self/fdinfo/{epoll}").read_text()
    except OSError:  # closed meanwhile
        return []
    return [int(fd) for fd in re.findall(r"^tfd:\s*(\d+)", info, re.MULTILINE)]


def _listening_inodes() -> set[str]:
    rows = [
        line.split()
        for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6")
        if Path(table).exists()
        for line in Path(table).read_text().splitlines()[1:]
    ]
    return {row[9] for row in rows if row[3] == _LISTEN}
