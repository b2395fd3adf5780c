"""A rank dies: the others are told at once and keep what they have, another one takes its place.

See `test_table.py` for what is shown elsewhere.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

import gpupool
from gpupool import Pool, PoolError, SpmdError
from gpupool.pool import session
from tests.faults.invariants import CANARY, DEADLINE_S, SECRET, SUM, Faulty
from tests.support.processes import kill, until
from tests.support.raising import raises

WAIT = "import time\nif rank == {rank}: time.sleep(600)\ndist.all_reduce(torch.ones(1))"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_while_the_others_wait_for_it(faulty: Faulty, rank: int) -> None:
    execution = faulty.begun(WAIT.format(rank=rank))
    kill(faulty.pool, rank)
    error = faulty.ended(execution)
    assert error.first.rank == rank
    assert "was killed by SIGKILL" in str(error)
    assert [other for other, one in error.errors.items() if one.freed] == [
        other for other in range(3) if other != rank
    ]
    faulty.check(lost=[rank])


def test_a_rank_is_killed_whose_child_holds_its_connections_open(faulty: Faulty) -> None:
    """The others do not hear of it from the connection, which ends with the child."""
    fork = "import os, time\nif rank == 1 and os.fork() == 0:\n    time.sleep(600); os._exit(0)\n"
    execution = faulty.begun(fork + WAIT.format(rank=1), after_s=0.3)
    kill(faulty.pool, 1)
    error = faulty.ended(execution)
    assert error.first.rank == 1
    faulty.check(lost=[1])


def test_two_ranks_are_killed_at_once(faulty: Faulty) -> None:
    execution = faulty.begun(WAIT.format(rank=0))
    kill(faulty.pool, 0, 2)
    error = faulty.ended(execution)
    assert {rank for rank, one in error.errors.items() if not one.freed} == {0, 2}
    faulty.check(lost=[0, 2])


def test_all_ranks_are_killed_at_once(faulty: Faulty) -> None:
    kill(faulty.pool, 0, 1, 2)
    faulty.check(lost=[0, 1, 2])


@pytest.mark.parametrize(
    ("death", "said"),
    [
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import os; os._exit(3)", "exit status 3"),
        ("import os; os.abort()", "SIGABRT"),
    ],
    ids=["segfault", "_exit", "abort"],
)
def test_a_rank_ends_its_process(faulty: Faulty, death: str, said: str) -> None:
    error = faulty.fails(f"if rank == 1:\n    {death}\ndist.all_reduce(torch.ones(1))")
    assert error.first.rank == 1
    assert said in str(error)
    faulty.check(lost=[1])


def test_a_rank_that_gloo_ends_since_sizes_differ_says_so(faulty: Faulty) -> None:
    error = faulty.fails("dist.all_reduce(torch.ones(400 if rank == 1 else 500))")
    ended = [one for one in error.errors.values() if "SIGABRT" in str(one)]
    assert ended
    assert all("tensors of different sizes" in str(one) for one in ended)
    faulty.check(lost=[one.rank for one in ended])


def test_a_rank_is_killed_while_all_are_idle(faulty: Faulty) -> None:
    kill(faulty.pool, 1)
    faulty.check(lost=[1])  # the next cell waits for the new one


def replaced(pool: Pool) -> None:
    """Wait until no rank is being replaced."""
    until(lambda: pool.status().state == "idle", DEADLINE_S, "the replacement")


def test_a_new_rank_is_killed_again_and_again(faulty: Faulty) -> None:
    for _ in range(3):
        kill(faulty.pool, 1)
        replaced(faulty.pool)
    faulty.check(lost=[1])


@pytest.mark.parametrize(
    "after_s", [0.0, 0.1, *(pytest.param(s, marks=pytest.mark.long) for s in (0.03, 0.3))]
)
def test_a_rank_is_killed_while_the_group_is_formed_again(faulty: Faulty, after_s: float) -> None:
    kill(faulty.pool, 1)
    time.sleep(after_s)
    kill(faulty.pool, 2)
    faulty.check(lost=[1, 2])


def test_a_rank_is_killed_right_after_the_others_were_freed(faulty: Faulty) -> None:
    error = faulty.fails("if rank == 1: 1 / 0\ndist.all_reduce(torch.ones(1))")
    kill(faulty.pool, 1)
    assert "ZeroDivisionError" in str(error)
    faulty.check(lost=[1])


def test_a_cell_that_was_to_follow_runs_on_the_new_rank(faulty: Faulty) -> None:
    first = faulty.begun(WAIT.format(rank=1))
    second = faulty.begin(SUM)
    kill(faulty.pool, 1)
    assert "SIGKILL" in str(faulty.ended(first))
    assert second.wait(DEADLINE_S)
    assert second.error() is None
    faulty.check(lost=[1])


def test_the_new_rank_has_what_the_old_one_was_started_with(faulty: Faulty) -> None:
    ask = (
        f"import os, sys\n(rank, world_size, str(device), os.environ['RANK'], os.getcwd(), "
        f"os.environ.get({SECRET!r}) == {CANARY!r}, torch.get_num_threads(), "
        "'torch' in sys.modules)"
    )
    before = dict(faulty.pool.run(ask))
    assert before[1][5] is True
    kill(faulty.pool, 1)
    assert dict(faulty.pool.run(ask)) == before
    faulty.check(lost=[1])


def test_what_the_lost_rank_had_is_said_to_be_lost(faulty: Faulty) -> None:
    faulty.pool["mine"] = 5
    faulty.pool.run("mine += rank")
    handle = faulty.pool["mine"]
    kill(faulty.pool, 1)
    faulty.check(lost=[1])
    assert handle[0] == 5
    with raises(PoolError, "lost", "mine", ranks=(1,)):
        handle[1]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_32_ranks_are_told_of_an_error_and_of_a_death_within_a_second() -> None:
    """The least of several tries counts, as others use the machine."""
    session.stop()
    with gpupool.start(n=32, device="cpu", timeout_s=200) as pool:
        told: dict[str, list[float]] = {"error": [], "death": []}
        raises = "import time\nif rank == 1: raise ValueError(time.time())\n"
        for _ in range(4):
            with pytest.raises(SpmdError) as caught:
                pool.run(f"{raises}dist.all_reduce(torch.ones(1))", timeout_s=60)
            told["error"].append(time.time() - caught.value.first.failed_at)
            assert caught.value.first.rank == 1
            assert pool.run(SUM, timeout_s=60)[31] == 32.0
            execution = pool.begin(WAIT.format(rank=1), ranks=range(32), on_output=lambda *_: None)
            assert not execution.wait(1.0)
            killed_at = time.time()
            os.kill(pool.status().pids[2], signal.SIGKILL)
            assert execution.wait(60)
            told["death"].append(time.time() - killed_at)
            assert pool.run(SUM, timeout_s=60)[31] == 32.0
        assert max(map(min, told.values())) < 1.0, told
