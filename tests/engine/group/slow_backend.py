"""A back end of `torch.distributed` whose groups begin and end as NCCL's do.

To begin, each member waits in torch, in C++, for all others. An abort takes its time. It is added
in torch's own way, in Python, and communicates nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

NAME = "slow"


class SlowGroup(dist.ProcessGroup):
    """Its abort begins (`has_begun`), and ends when `may_end` is set.

    `num_aborts` were called. `met` names what was called in the middle of an abort: two calls that
    free one communicator of NCCL at a time crash.
    """

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._name = name
        self.num_aborts = 0
        self.met: list[str] = []
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self._frees = threading.Lock()

    @property
    def group_name(self) -> str:
        """What torch finds it by."""
        return self._name

    def abort(self) -> None:
        """Free the communicator, which takes a while."""
        self.num_aborts += 1
        self.has_begun.set()
        self._free("abort", self.may_end.wait)

    def shutdown(self) -> None:
        """What `destroy_process_group` calls."""
        self._free("shutdown", lambda: None)

    def _free(self, name: str, work: Callable[[], object]) -> None:
        if not self._frees.acquire(blocking=False):
            self.met.append(name)
            return
        try:
            work()
        finally:
            self._frees.release()


def register() -> None:
    """Have torch know it in this process."""

    def make(options: Any, _: object) -> SlowGroup:
        options.store.set(str(options.group_rank), "")
        options.store.wait([str(rank) for rank in range(options.group_size)])
        return SlowGroup(options.group_rank, options.group_size, options.group_id)

    dist.Backend.register_backend(NAME, make, extended_api=True, devices=["cpu"])


def new_group() -> SlowGroup:
    """A sub-group of all ranks."""
    register()
    group = dist.new_group(backend=NAME)
    assert isinstance(group, SlowGroup)
    return group
