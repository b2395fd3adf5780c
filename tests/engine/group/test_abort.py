"""An abort that takes its time, as NCCL's does: once for each group, and all others wait for it.

The groups are of a back end that torch is given in its own way, in Python. It communicates nothing.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch.distributed as dist

from gpupool.data import device as devices
from gpupool.engine.cells import torchrun
from gpupool.engine.group import abort, forming
from gpupool.engine.group.abort import abort_collectives, finish_aborts
from tests.engine.group.later import Later
from tests.engine.group.torch_ranks import run_ranks


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
        return self._name

    def abort(self) -> None:
        self.num_aborts += 1
        self._note("abort")
        self.has_begun.set()
        self.may_end.wait()

    def shutdown(self) -> None:
        """What `destroy_process_group` calls."""
        self._note("shutdown")

    def _note(self, call: str) -> None:
        if self.has_begun.is_set() and not self.may_end.is_set():
            self.met.append(call)


def slow_group() -> SlowGroup:
    """A sub-group of the one rank that there is."""

    def make(options: Any, _: object) -> SlowGroup:
        return SlowGroup(options.group_rank, options.group_size, options.group_id)

    dist.Backend.register_backend("slow", make, extended_api=True, devices=["cpu"])
    group = dist.new_group(backend="slow")
    assert isinstance(group, SlowGroup)
    return group


def in_threads(*works: Any) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


def one_abort(rank: int) -> tuple[int, list[str], list[bool], bool]:
    group = slow_group()
    held, seen = weakref.ref(group), list[bool]()

    def note() -> None:
        group = held()
        seen.append(bool(group and group.has_begun.is_set()))

    abort.before_abort = note
    callers = in_threads(*[abort_collectives] * 5)
    assert group.has_begun.wait(10)
    was_done = finish_aborts(0.01)
    group.may_end.set()
    for thread in callers:
        thread.join(10)
    assert finish_aborts()
    abort_collectives()
    return group.num_aborts, group.met, seen, was_done


def test_a_group_is_aborted_once_however_many_ask_and_it_is_said_before() -> None:
    ((num_aborts, met, seen, was_done),) = run_ranks(one_abort, n=1)
    assert (num_aborts, met, was_done) == (1, [], False)
    assert (len(seen), seen[0]) == (6, False)


def leave(rank: int, how: str) -> bool:
    """Leave the group in the middle of an abort, or with work queued; whether that has waited."""
    if how != "left":
        torchrun.install()
    device, met = Later(), list[str]()
    if how == "busy":  # as a GPU behind a collective that no peer comes to
        device.done.clear()
        devices.put(device)
        go_on = device.done.set
    else:
        group = slow_group()
        abort_collectives()
        go_on, met = group.may_end.set, group.met
    (thread,) = in_threads(forming.leave if how == "left" else dist.destroy_process_group)
    thread.join(0.2)
    waits = thread.is_alive()
    go_on()
    thread.join(10)
    assert not thread.is_alive()
    assert not dist.is_initialized()
    assert met == []
    return waits


@pytest.mark.parametrize("how", ["left", "destroyed", "busy"])
def test_no_group_ends_while_it_is_being_aborted_or_its_device_has_work(how: str) -> None:
    assert run_ranks(leave, how, n=1) == [True]
