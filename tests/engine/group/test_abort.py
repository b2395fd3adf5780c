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


def in_threads(*works: Any) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


def one_abort(rank: int) -> tuple[int, list[str], list[bool], bool]:
    group = slow_backend.new_group()
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
        group = slow_backend.new_group()
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
