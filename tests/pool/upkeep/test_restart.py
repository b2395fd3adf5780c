"""Ranks are replaced while the others keep what they have."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time

import psutil
import pytest

from gpupool import Pool, PoolError, PoolOptions, SpmdError
from tests.support.processes import engine_pid, family, folder_of, gone, is_told, kill, until
from tests.support.raising import raises

SUM = "x = torch.ones(1); dist.all_reduce(x); x.item()"
KEPT = "globals().get('kept')"


@pytest.fixture
def pool3(pool3: Pool) -> Pool:
    """Three CPU ranks, each with a variable `kept`."""
    pool3.run("kept = 10 + rank")
    return pool3


def test_a_restart_takes_a_dead_rank_along_and_is_not_told_as_a_loss(
    pool3: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    before = pool3.status().pids
    kill(pool3, 0)
    pool3.restart()
    assert not set(before.values()) & set(pool3.status().pids.values())
    assert gone(*before.values())
    assert dict(pool3.run(KEPT)) == {0: None, 1: None, 2: None}
    assert capsys.readouterr().err == ""


def restarting(pool: Pool) -> tuple[threading.Thread, list[PoolError]]:
    """A thread that restarts rank 1, and the error that it ends with."""
    failed: list[PoolError] = []

    def restart() -> None:
        try:
            pool.restart([1])
        except PoolError as error:
            failed.append(error)

    thread = threading.Thread(target=restart)
    thread.start()
    return thread, failed


def test_a_stop_ends_a_restart_too(pool3: Pool) -> None:
    before = engine_pid(pool3, 1)
    family(pool3)["controller"].suspend()  # so that the restart is not over before
    thread, failed = restarting(pool3)
    until(lambda: gone(before), 5.0)
    pool3.stop()
    thread.join(40)  # and not the minute that a new engine has to come up
    assert isinstance(failed[0], PoolError)


@pytest.mark.long
def test_a_restart_that_fails_costs_the_others_nothing(pool3: Pool) -> None:
    """The rank's new process cannot come: each is killed as soon as it is there."""
    starter = family(pool3)["starter"]
    thread, failed = restarting(pool3)
    while thread.is_alive():
        for child in starter.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == "gpupool:rank1":
                    child.kill()
        time.sleep(0.02)
    assert failed[0].ranks == (1,)
    pool3.restart([1])
    assert dict(pool3.run(KEPT)) == {0: 10, 1: None, 2: 12}


def test_a_rank_that_dies_during_a_restart_is_replaced_with_it(pool3: Pool) -> None:
    before, controller = pool3.status().pids, family(pool3)["controller"]
    controller.suspend()  # so that the restart is not over before
    thread, failed = restarting(pool3)
    until(lambda: gone(before[1]), 5.0)
    os.kill(before[2], signal.SIGKILL)
    until(lambda: is_told(pool3, {2: before[2]}), 5.0)
    controller.resume()
    thread.join(120)
    assert (thread.is_alive(), failed) == (False, [])
    assert dict(pool3.run(KEPT)) == {0: 10, 1: None, 2: None}
    assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}


def test_a_private_folder_that_is_removed_costs_no_rank_and_is_named(pool3: Pool) -> None:
    folder, pids = folder_of(pool3), pool3.status().pids
    shutil.rmtree(folder.parent)
    with pytest.raises(SpmdError, match="ZeroDivisionError"):
        pool3.run("if rank == 1: 1 / 0\ndist.all_reduce(torch.ones(1))")
    with raises(PoolError, str(folder), "`%gpupool stop`"):
        pool3.run(SUM)
    with raises(PoolError, str(folder)):
        pool3.restart([1])
    assert pool3.status().pids == pids
    pool3.stop()
    with Pool(PoolOptions(n=1, device="cpu")) as another:  # by a starter with a folder
        assert another.run("rank")[0] == 0
