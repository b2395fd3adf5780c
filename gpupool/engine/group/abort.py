"""Free this rank from the collective it is blocked in. Runs on engines, in any thread.

No call of torch ends a blocked gloo collective, not even destroying the group, which a DDP wrapper
or a traceback may hold. Shutting the group's own sockets does, at once, on this rank and on peers
that wait for it, with a RuntimeError. NCCL has `ProcessGroup.abort`, which gloo ignores, and raises
nothing: what the host has queued behind the collective is computed with half a sum.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gpupool.data import device as devices
from gpupool.engine.group.gloo_sockets import gloo_connections

# Called each time before the first connection is shut and the first group aborted.
before_abort: Callable[[], object] | None = None

_lock = threading.Lock()
# The one abort that a group ever has: two of one communicator crash, or hang. Each has a thread of
# its own: several communicators of a rank wait for each other's abort on the peers (nccl#1013).
_aborts: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Thread] = (
    weakref.WeakKeyDictionary()
)


def abort_collectives() -> None:
    """Begin to abort every process group of this rank, which are dead then and have to be formed
    again. Harmless when idle. `finish_aborts` waits for the end."""
    if before_abort is not None:
        before_abort()
    with gloo_connections() as connections:
        for connection in connections:
            # Only this half: gloo loses a send whose socket is shut just when its event loop writes
            # (`Pair::handleRemotePendingRecv`), and the rank stays blocked in
            # `UnboundBuffer::waitSend`. When the peer's end has gone first, that happens to one in
            # some hundred, which is replaced.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
    with _lock:
        for group in list(distributed_c10d._world.pg_map):  # whatever it says of its back end
            if group not in _aborts:
                thread = threading.Thread(target=_abort, args=[group], daemon=True)
                thread.start()
                _aborts[group] = thread
    finish_aborts(0.5)  # the control thread has more to answer


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(Exception):  # a back end that cannot, of an older torch
        group.abort()


def finish_aborts(limit_s: float | None = None) -> bool:
    """Wait until every abort that was begun is done; returns whether it is.

    Nobody leaves or destroys a group before: its communicator is just being freed. ncclCommAbort
    waits for its kernels, which stand behind those of the user.
    """
    with _lock:
        threads = list(_aborts.values())
    for thread in threads:
        thread.join(limit_s)
    return not any(thread.is_alive() for thread in threads)


class CompletedSteps:
    """Counts the steps of a training on the device, which comes to them later than the host. Of a
    copy of its state it says whether the steps before were computed with whole sums."""

    def __init__(self, device: torch.device) -> None:
        global before_abort
        self._device = devices.of(device)
        self._counter = self._device.counter()
        self._num_begun = 0
        self._at_abort: int | None = None
        before_abort = self.freeze

    def add(self) -> None:
        """The host has given the device all that belongs to a step."""
        self._num_begun += 1
        self._counter.advance()

    def freeze(self) -> None:
        if self._at_abort is None:  # later ones find more steps that were computed with half sums
            self._at_abort = self._counter.value()

    def why_spoilt(self) -> str:
        """Why the device's state after the last step is worth nothing; "" if it is sound.

        To be asked when the device has made a copy of the state: sooner, the abort may yet come.
        """
        if not self._device.lags or self._at_abort in (None, self._num_begun):
            return ""
        return (
            f"the device had completed {self._at_abort:,} of {self._num_begun:,} steps when the "
            "collectives of the others were aborted"
        )

    def why_spoilt_at_end(self) -> str:
        self._device.synchronize()
        return self.why_spoilt()
