"""Where ranks say that they are while they are blocked, and when they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gpupool import Pool
from gpupool.core.wire.location import Location
from gpupool.core.wire.requests import Where
from gpupool.pool.calls.execution import Execution
from tests.support.processes import until

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


def asked(pool: Pool, rank: int) -> Location:
    answer = pool.engines.control(Where(), [rank])[rank].result(60)
    assert answer.found is not None
    return answer.found


@pytest.mark.parametrize(
    ("call", "doing"),
    [
        ("dist.all_reduce(x, async_op=True).wait()", "all_reduce"),
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


def test_a_rank_tells_nothing_of_a_group_that_was_aborted(pool2: Pool, begin: Begin) -> None:
    """torch keeps what was called in it as pending for ever."""
    execution = begin("if rank == 0: dist.all_reduce(torch.ones(1))\nimport time; time.sleep(60)")
    until(lambda: asked(pool2, 0).collective is not None, 10.0)
    execution.interrupt()
    assert execution.wait(20)
    pool2.run("dist.barrier()")  # in the group of now
    # torch counts a collective as over a moment after it has returned
    until(lambda: asked(pool2, 0).collective is None, 10.0, "the end of its last collective")
    assert asked(pool2, 0).idle
