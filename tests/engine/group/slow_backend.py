"""A back end of `torch.distributed` whose groups begin and end as NCCL's do.

To begin, each member waits in torch, in C++, for all others. An abort takes its time. It is added
in torch's own way, in Python, and communicates nothing.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

NAME = "slow"


class SlowGroup(dist.ProcessGroup):
    """Its abort begins (`has_begun`), and ends when `may_end` is set.

    `num_aborts` were called. `met` names what was called in the middle of one: two calls that free
    one communicator of NCCL at a time crash.
    """

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._name, self.num_aborts, self.met = name, 0, list[str]()
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    @property
    def group_name(self) -> str:
        """What torch finds it by."""
        return self._name

    def abort(self) -> None:
        """Free the communicator, which takes a while."""
        self.num_aborts += 1
        if self.has_begun.is_set() and not self.may_end.is_set():
            self.met.append("abort")
        self.has_begun.set()
        self.may_end.wait()

    def shutdown(self) -> None:
        """What `destroy_process_group` calls."""
        if self.has_begun.is_set() and not self.may_end.is_set():
            self.met.append("shutdown")


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
