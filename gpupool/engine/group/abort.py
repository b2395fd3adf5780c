"""Free this rank from the collective it is blocked in. Runs on engines, in any thread.

No call of torch ends a blocked gloo collective, not even destroying the group: the connections stay
open for as long as a DDP wrapper or a traceback holds the group. Shutting the group's own sockets
does end it, at once, on this rank and on the peers that wait for it, with a RuntimeError. NCCL has
`ProcessGroup.abort`, which gloo ignores. The group is dead afterwards and has to be formed again
(`forming.py`).

On gloo a failed collective raises where it stands. On NCCL nothing raises: what is queued behind it
is computed with half a sum. Who has to know how far the device had come puts a function in
`before_abort`.

One in some hundred ranks that begin collectives again and again at that very moment stays blocked:
seen in `UnboundBuffer::waitSend` with every connection closed. By its source gloo loses a send
whose socket is shut just when its event loop has taken it off the list and writes
(`Pair::handleRemotePendingRecv`). Only the receiving half is shut here, so that such writes still
go through, and ranks are interrupted a moment before (`pool/calls/freeing.py`). It still
happens, when the peer's end has gone first; that rank is replaced.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import distributed_c10d

from gpupool.engine.group.gloo_sockets import gloo_connections, shut

ABORT_S = 10.0  # ncclCommAbort waits for its kernels, which stand behind those of the user
_SOON_S = 0.5  # the control thread has more to answer


def _nothing() -> None:
    pass


before_abort: Callable[[], None] = _nothing
"""Called each time before the first connection is shut or the first group aborted, in the thread
that does it."""

_lock = threading.Lock()
# The one abort that a group ever has: two of one communicator crash, or hang. Each has a thread of
# its own: several communicators of a rank wait for each other's abort on the peers (nccl#1013).
_aborts: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Thread] = (
    weakref.WeakKeyDictionary()
)


def abort_collectives() -> int:
    """Abort every process group of this rank; returns how many gloo connections were shut.

    Harmless when idle or called again. Aborts that take their time continue when it returns:
    `finish_aborts` waits for them.
    """
    try:
        before_abort()
    except Exception:  # whoever waits in a collective is freed all the same
        logging.getLogger("gpupool").exception("what is called before an abort failed")
    connections = gloo_connections().items()
    num_shut = sum(shut(fd, inode, socket.SHUT_RD) for fd, inode in connections)
    with _lock:
        for group in list(distributed_c10d._world.pg_map):  # whatever it says of its back end
            if group not in _aborts:
                thread = threading.Thread(target=_abort, args=[group], daemon=True)
                thread.start()
                _aborts[group] = thread
    finish_aborts(_SOON_S)
    return num_shut


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(Exception):  # a back end that cannot, of an older torch
        group.abort()


def was_aborted(group: object) -> bool:
    """Whether an abort of this group has begun."""
    with _lock:
        return group in list(_aborts)


def finish_aborts(limit_s: float = ABORT_S) -> bool:
    """Wait until every abort that was begun is done; returns whether it is.

    Nobody leaves or destroys a group before: its communicator is just being freed.
    """
    with _lock:
        threads = list(_aborts.values())
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
