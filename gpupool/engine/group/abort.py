"""Free this rank from the collective it is blocked in. Runs on engines, in any thread.

No call of torch ends a blocked gloo collective, not even destroying the group: the connections stay
open for as long as a DDP wrapper or a traceback holds the group. Shutting the group's own sockets
does end it, at once, on this rank and on the peers that wait for it, with a RuntimeError. NCCL has
`ProcessGroup.abort`. The group is dead afterwards and has to be formed again (`forming.py`).

One in some hundred ranks that begin collectives again and again at that very moment stays blocked:
seen in `UnboundBuffer::waitSend` with every connection closed. By its source gloo loses a send
whose socket is shut just when its event loop has taken it off the list and writes
(`Pair::handleRemotePendingRecv`). Only the receiving half is shut here, so that such writes still
go through, and ranks are interrupted a moment before (`pool/calls/ladder.py`). It still
happens, when the peer's end has gone first; that rank is replaced.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import torch.distributed as dist
from torch.distributed import distributed_c10d

from gpupool.engine.group.gloo_sockets import gloo_connections, shut

_NCCL_ABORT_S = 2.0  # what has not returned by then is left to itself: the rank will be replaced


def abort_collectives() -> int:
    """Abort every process group of this rank; returns how many gloo connections were shut.

    Harmless when idle or called again.
    """
    connections = gloo_connections().items()
    num_shut = sum(shut(fd, inode, socket.SHUT_RD) for fd, inode in connections)
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
