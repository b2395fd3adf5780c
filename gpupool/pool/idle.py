"""Stops a pool that nobody uses, after a warning. Runs on the client."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

from gpupool.pool.status import PoolStatus

_WARNING_S = 120.0
_LOOK_S = 1.0


class Stoppable(Protocol):
    """What is watched: a `gpupool.pool.pool.Pool`."""

    def status(self) -> PoolStatus: ...
    def tell_listeners(self) -> None: ...
    def stop(self, reason: str = "") -> None: ...


def warning_s(limit_s: float | None) -> float:
    """How long before the end a pool with this limit warns."""
    return 0.0 if limit_s is None else min(_WARNING_S, limit_s / 4)


def watch(pool: Stoppable, reason: str) -> None:
    """Stop the pool in time, for this reason, in the background.

    This does not keep it alive until then.
    """
    reference = weakref.ref(pool)
    del pool
    thread = threading.Thread(target=_watch, args=[reference, reason], daemon=True)
    thread.name = "gpupool-idle"
    thread.start()


def _watch(reference: weakref.ref[Stoppable], reason: str) -> None:
    warned = False
    while (pool := reference()) is not None:
        status = pool.status()
        left = status.idle_left_s
        if status.state == "stopped" or left is None:
            return
        if status.stops_soon != warned:
            warned = status.stops_soon
            pool.tell_listeners()
        if left <= 0:
            pool.stop(reason)
            return
        del pool  # else a pool that nobody holds would live until the next look
        time.sleep(min(_LOOK_S, max(0.05, left)))
