"""Ranks are lost and replaced: the others keep what they have, and nothing waits for ever."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from gpupool import Pool, PoolError, PoolOptions, SpmdError
from tests.support.processes import (
    engine_pid,
    family,
    folder_of,
    gone,
    is_told,
    kill,
    reach,
    reached,
    until,
)
from tests.support.raising import raises
from tests.support.waits import until_there

SUM = "x = torch.ones(1); dist.all_reduce(x); x.item()"
KEPT = "globals().get('kept')"
SOON_S = 30.0


@pytest.fixture
def pool3(pool3: Pool) -> Pool:
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


# ---- what is asked for meanwhile ---------------------------------------------------------------


def test_ranks_that_a_stop_ends_run_what_is_to_run_at_exit(pool3: Pool, tmp_path: Path) -> None:
    pool3.run(f"import atexit; atexit.register(lambda: {reach(tmp_path / 'rank')})")
    pool3.stop()
    assert reached(tmp_path / "rank", 0, 1, 2)


def test_a_rank_is_replaced_while_a_value_waits_to_be_sent(pool3: Pool, tmp_path: Path) -> None:
    go = tmp_path / "go"
    running = pool3.begin(until_there(go), ranks=(0, 2), on_output=lambda *_: None)
    sent: list[object] = []
    sender = threading.Thread(target=lambda: sent.append(pool3.put(list(range(9)))), daemon=True)
    sender.start()
    until(lambda: pool3.turns.are_in_use([1]), SOON_S)  # it waits for ranks 0 and 2
    kill(pool3, 1)
    go.touch()
    sender.join(SOON_S)
    assert len(sent) == 1
    assert running.error() is None
    assert dict(pool3.run(len, sent[0])) == {0: 9, 1: 9, 2: 9}


def test_what_follows_a_broken_group_waits_its_turn_while_another_cell_runs(
    pool3: Pool, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    pool3.run("pair = dist.new_group([0, 1])")
    running = pool3.begin(until_there(go), ranks=(2,), on_output=lambda *_: None)
    with pytest.raises(SpmdError, match="ZeroDivisionError"):
        pool3.run("if rank == 0: 1 / 0\ndist.barrier(pair)", ranks=[0, 1])
    following = pool3.begin("1", ranks=(0,), on_output=lambda *_: None)
    assert following.waits_for == ["the forming of the process group"]
    go.touch()
    assert following.wait(SOON_S)
    assert (running.error(), following.error()) == (None, None)
    assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}
