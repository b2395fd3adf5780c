"""An abort that takes its time, as NCCL's does: once for each group, and all others wait for it."""

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
from tests.engine.group import slow_backend
from tests.engine.group.later import Later
from tests.engine.group.torch_ranks import run_ranks


class Note:
    """Notes when it is called, and whether an abort had begun by then."""

    def __init__(self, group: slow_backend.SlowGroup) -> None:
        self.seen: list[bool] = []
        self._group = weakref.ref(group)

    def __call__(self) -> None:
        group = self._group()
        self.seen.append(bool(group and group.has_begun.is_set()))
        raise ZeroDivisionError  # must keep nobody from being freed


def in_threads(*works: Any) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


def one_abort(rank: int) -> tuple[int, list[str], list[bool], bool]:
    group = slow_backend.new_group()
    note = Note(group)
    abort.before_abort = note
    callers = in_threads(*[abort_collectives] * 5)
    assert group.has_begun.wait(10)
    was_done = finish_aborts(0.01)
    group.may_end.set()
    for thread in callers:
        thread.join(10)
    assert finish_aborts()
    abort_collectives()
    return group.num_aborts, group.met, note.seen, was_done


def test_a_group_is_aborted_once_however_many_ask_and_it_is_said_before() -> None:
    ((num_aborts, met, seen, was_done),) = run_ranks(one_abort, n=1)
    assert (num_aborts, met, was_done) == (1, [], False)
    assert (len(seen), seen[0]) == (6, False)


def leave_meanwhile(rank: int, how: str) -> tuple[list[str], bool]:
    if how == "destroyed":
        torchrun.install()
    group = slow_backend.new_group()
    abort_collectives()
    leave = {"destroyed": dist.destroy_process_group, "left": forming.leave}[how]
    (thread,) = in_threads(leave)
    thread.join(0.2)
    waits = thread.is_alive()
    group.may_end.set()
    thread.join(10)
    assert not thread.is_alive()
    assert not dist.is_initialized()
    return group.met, waits


@pytest.mark.parametrize("how", ["destroyed", "left"])
def test_no_group_ends_while_it_is_being_aborted(how: str) -> None:
    assert run_ranks(leave_meanwhile, how, n=1) == [([], True)]


def destroy_on_a_busy_device(rank: int) -> bool:
    torchrun.install()
    device = Later()  # as a GPU behind a collective that no peer comes to
    device.done.clear()
    devices.put(device)
    (thread,) = in_threads(dist.destroy_process_group)
    thread.join(0.2)
    waits = thread.is_alive()
    device.done.set()
    thread.join(10)
    assert not dist.is_initialized()
    return waits


def test_a_group_is_destroyed_when_the_device_has_done_what_was_queued() -> None:
    assert run_ranks(destroy_on_a_busy_device, n=1) == [True]
