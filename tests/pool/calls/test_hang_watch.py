"""Where ranks say that they are while they are blocked, and hangs that are noticed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from gpupool import Pool
from gpupool.core.wire.location import Location
from gpupool.core.wire.requests import Where
from gpupool.pool.calls.execution import Execution
from gpupool.pool.calls.hang_watch import Diagnosis, HangWatch
from tests.support.processes import engine_pid, until

Begin = Callable[[str], Execution]
LATE = "import time\ntime.sleep(60)"  # what rank 1 does instead


@pytest.fixture
def begin(pool2: Pool) -> Iterator[Begin]:
    """Begins a cell on both ranks; ended after the test, and the group is formed again."""
    begun: list[Execution] = []

    def begin(source: str) -> Execution:
        begun.append(pool2.begin(source, ranks=(0, 1), on_output=lambda *_: None, cell_number=3))
        return begun[-1]

    yield begin
    for execution in begun:
        execution.interrupt()
        assert execution.wait(60)


def asked(pool: Pool, rank: int, **how: bool) -> Location:
    answer = pool.ask(Where(**how), [rank])[rank].result(60)
    assert answer.found is not None
    return answer.found


def asked_when_it_is_over(pool: Pool, rank: int) -> Location:
    """What an idle rank tells; torch counts a collective as over a moment after it has returned."""
    told: list[Location] = []

    def is_over() -> bool:
        told.append(asked(pool, rank))
        return told[-1].collective is None

    until(is_over, 10.0, "the end of its last collective")
    return told[-1]


# ---- where they are --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "doing"),
    [
        ("dist.all_reduce(x, async_op=True).wait()", "all_reduce"),
        ("dist.monitored_barrier()", "monitored_barrier"),
        ("dist.recv(x, 1)", "recv"),
        ("dist.all_gather_object([0, 0], 'x')", "all_gather_object (all_gather)"),
        ("dist.irecv(x, 1).wait()", ""),  # torch keeps no note of it: the line tells
    ],
)
def test_a_blocked_rank_tells_its_collective_and_line(
    pool2: Pool, begin: Begin, call: str, doing: str
) -> None:
    begin(f"import time\nx = torch.ones(1)\nif rank == 0:\n    {call}\nelse: time.sleep(60)")
    at = "Cell In[3], line 4"
    until(lambda: asked(pool2, 0).was == (f"in {doing} ({at})" if doing else f"at {at}"), 10.0)
    until(lambda: asked(pool2, 1).was == "at Cell In[3], line 5", 10.0)


@pytest.mark.long
def test_the_backward_pass_of_ddp_waits_in_the_users_line(pool2: Pool, begin: Begin) -> None:
    pool2.run(
        "ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "loss = ddp(torch.ones(2, 4)).sum()"
    )
    begin(f"if rank == 1:\n    {LATE.replace(chr(10), '; ')}\nloss.backward()")
    until(lambda: asked(pool2, 0).collective is not None, 10.0)
    where = asked(pool2, 0)
    assert where.collective is not None
    assert (where.collective.op, where.line) == ("all_reduce", "Cell In[3], line 3")
    assert (where.collective.ranks, where.collective.values) == ((0, 1), "float32[5]")


def test_a_rank_tells_nothing_of_a_group_that_was_aborted(pool2: Pool, begin: Begin) -> None:
    """torch keeps what was called in it as pending for ever."""
    execution = begin("if rank == 0: dist.all_reduce(torch.ones(1))\nimport time; time.sleep(60)")
    until(lambda: asked(pool2, 0).collective is not None, 10.0)
    execution.interrupt()
    assert execution.wait(20)
    pool2.run("dist.barrier()")  # in the group of now
    where = asked_when_it_is_over(pool2, 0)
    assert (where.idle, where.collective) == (True, None)


def test_an_idle_rank_says_so_and_what_it_did_last(pool2: Pool) -> None:
    pool2.run("dist.all_reduce(torch.ones(1)); dist.broadcast(torch.ones(2), src=0)")
    where = asked_when_it_is_over(pool2, 1)
    assert (where.idle, where.collective) == (True, None)
    assert [one.op for one in where.last if one.group == "0"] == ["broadcast"]


def test_a_glance_names_no_collective_that_has_begun_since_the_last_one(
    pool2: Pool, begin: Begin
) -> None:
    asked(pool2, 0, glance=True)
    begin(f"if rank == 0: dist.all_reduce(torch.ones(1))\nelse: {LATE.replace(chr(10), '; ')}")
    seen: list[Location] = []

    def is_named() -> bool:
        seen.append(asked(pool2, 0, glance=True))
        return seen[-1].collective is not None

    until(is_named, 10.0)
    assert [one.function for one in seen[-2:]] == ["all_reduce", "all_reduce"]
    assert seen[-2].collective is None


# ---- hangs -----------------------------------------------------------------------------------


@pytest.fixture
def watched(pool2: Pool, begin: Begin) -> Callable[..., Diagnosis]:
    """Runs a cell and looks at it, by a clock that is five times as fast, until it is diagnosed.

    `is_it`: a slow rank may have been waited for before. Whoever looks late sees longer times.
    """

    def watched(
        source: str, is_it: Callable[[Diagnosis], bool] = lambda _: True, speed: float = 5.0
    ) -> Diagnosis:
        began = time.monotonic()
        execution, watch = begin(source), HangWatch(pool2._all_ranks, (0, 1), 10.0, began)
        found: list[Diagnosis] = []

        def look() -> bool:
            finished = {*execution.values, *execution.errors}
            now = began + (time.monotonic() - began) * speed
            diagnosis = watch.look(finished, now)
            found.extend([diagnosis] if diagnosis else [])
            return bool(found) and is_it(found[-1])

        until(look, 30.0, "a diagnosis")
        return found[-1]

    return watched


@pytest.mark.long
def test_a_rank_that_computes_meanwhile_is_no_hang(watched: Callable[..., Diagnosis]) -> None:
    # By the real clock: on a machine with much to do a rank may get little of it.
    begun = "work = dist.all_reduce(torch.ones(1), group=pair, async_op=True)"
    code = f"pair = dist.new_group([0, 1])\nif rank == 0:\n    {begun}\n    while 1: pass"
    code, told = f"{code}\ndist.barrier()", "rank 1 in barrier"
    diagnosis = watched(code, lambda one: told in one.text, speed=1.0)
    assert not diagnosis.is_hang


def test_a_process_that_was_stopped(pool2: Pool, watched: Callable[..., Diagnosis]) -> None:
    pid = engine_pid(pool2, 1)
    try:
        diagnosis = watched(
            "import os, signal, time\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
            "time.sleep(60)"
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (diagnosis.is_hang, diagnosis.ranks) == (False, (1,))
    assert f"Rank 1 (process {pid}) has been stopped for " in diagnosis.text
    assert f"`kill -CONT {pid}` resumes it" in diagnosis.text


def test_short_cells_are_not_asked(pool2: Pool) -> None:
    watch = HangWatch(pool2._all_ranks, (0, 1), 30.0, 100.0)
    for now in (100.0, 101.0, 101.9):
        assert watch.look(set(), now) is None
    assert watch.where == {}
