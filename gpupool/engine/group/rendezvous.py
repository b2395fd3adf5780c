"""Ranks wait for each other in Python, where the wait can be ended. Runs on engines.

One that waits inside torch for another that does not come could not be interrupted. Where torch
itself waits all the same, it does so in the store of the group: before the first message between
two ranks on NCCL, and before the first collective of a sub-group. The store's time ends that.
"""

from __future__ import annotations

import datetime
import threading
import time
from typing import Any

_POLL_S = 0.003
_SOON_S, _NUM_SOON = 0.0005, 20  # who comes at all comes mostly at once

_AT_ONCE = datetime.timedelta(milliseconds=1)

_give_up = threading.Event()  # whoever waits for other ranks is to stop waiting
_store: Any = None  # of the present group


def exchange(store: Any, key: str, place: int, size: int, value: str = "") -> list[str]:
    """The values of all members, in order of their places; returns when all have come.

    Raises:
        RuntimeError: `give_up_waiting` was called meanwhile.
    """
    __tracebackhide__ = True
    store.set(f"{key}/{place}", value)
    keys = [f"{key}/{other}" for other in range(size)]
    num_looks = 0
    while not store.check(keys):
        if _give_up.is_set():
            raise RuntimeError("init_process_group: another rank has failed, and does not come.")
        time.sleep(_SOON_S if num_looks < _NUM_SOON else _POLL_S)
        num_looks += 1
    return [store.get(key).decode() for key in keys]


def give_up_waiting() -> None:
    """Have this rank wait no longer for others that do not come; from any thread."""
    _give_up.set()
    if _store is not None:
        _store.set_timeout(_AT_ONCE)  # a FileStore looks at it again and again


def begin_waiting() -> None:
    """Waiting makes sense again: all ranks are asked to come."""
    _give_up.clear()


def use_store(store: Any) -> None:
    """From now on torch waits for other ranks in this one."""
    global _store
    _store = store
