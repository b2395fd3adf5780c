"""Ranks are replaced while the others keep what they have."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import zmq
from ipyparallel.util import connect

from gpupool import Pool, PoolError, SpmdError
from tests.support.processes import (
    engine_pid,
    family,
    folder_of,
    gone,
    kill,
    members,
    reach,
    reached,
    until,
)
from tests.support.raising import raises, same_on

SUM = "x = torch.ones(1); dist.all_reduce(x); x.item()"
KEPT = "globals().get('kept')"
SOON_MS = 30_000


@pytest.fixture
def pool3(pool3: Pool) -> Pool:
    """Three CPU ranks, each with a variable `kept`."""
    pool3.run("kept = 10 + rank")
    return pool3


def test_one_rank_is_replaced_and_the_others_keep_their_variables(pool3: Pool) -> None:
    before, generation = pool3.status().pids, pool3.generation
    pool3.restart(ranks=[1])
    after = pool3.status().pids
    assert [before[rank] == after[rank] for rank in range(3)] == [True, False, True]
    assert gone(before[1])
    assert dict(pool3.run(KEPT)) == {0: 10, 1: None, 2: 12}
    assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}
    assert pool3.generation == generation + 1


@pytest.mark.long
def test_the_heart_that_beats_no_more_is_not_noted_for_ever(pool3: Pool) -> None:
    """Beats are counted where engines hear them. The monitor notes at each who missed the last."""
    pool3.restart(ranks=[1])
    log = folder_of(pool3) / "controller.log"
    told = json.loads((folder_of(pool3) / "profile/security/ipcontroller-engine.json").read_text())
    with zmq.Context() as context, context.socket(zmq.SUB) as beats:
        key = told.get("curve_serverkey")
        connect(beats, f"{told['interface']}:{told['hb_ping']}", key and key.encode())
        beats.subscribe(b"")
        for _ in range(10):
            assert beats.poll(SOON_MS)
            beats.recv()
    assert log.read_text() == ""


def test_the_new_one_has_rank_threads_environment_folder_and_names(pool3: Pool) -> None:
    os.environ["GPUPOOL_TEST_KEY"] = "a-value-that-is-secret"
    pool3.propagate_env("GPUPOOL_TEST_KEY")
    where = (
        "import os, sys\n(rank, world_size, local_rank, str(device), os.environ['RANK'], "
        "torch.get_num_threads(), os.getcwd(), os.environ.get('GPUPOOL_TEST_KEY'), "
        "dist.get_world_size(), [p for p in sys.path if p])"
    )
    before = dict(pool3.run(where))
    pool3.restart(2)
    assert dict(pool3.run(where)) == before
    pool3.propagate_env("GPUPOOL_TEST_KEY", unset=True)


def test_all_ranks_are_replaced_without_an_argument(pool3: Pool) -> None:
    before = pool3.status().pids
    pool3.restart()
    assert not set(before.values()) & set(pool3.status().pids.values())
    assert gone(*before.values())
    assert dict(pool3.run(KEPT)) == {0: None, 1: None, 2: None}


def test_a_dead_rank_is_replaced_without_being_asked(pool3: Pool) -> None:
    told: list[tuple[str, str]] = []
    pool3.add_listener(lambda status: told.append((status.state, status.reason)))
    kill(pool3, 0)
    until(lambda: bool(told), 5.0)
    assert told[0] == ("replacing", "rank 0 was killed by SIGKILL.")
    assert dict(pool3.run(KEPT)) == {0: None, 1: 11, 2: 12}
    assert pool3.status().state == "idle"
    assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}


def test_two_dead_ranks_are_replaced_together(pool3: Pool) -> None:
    kill(pool3, 0, 2)
    assert dict(pool3.run(KEPT)) == {0: None, 1: 11, 2: None}


def test_a_restart_of_a_rank_takes_a_dead_one_along(pool3: Pool) -> None:
    kill(pool3, 0)
    pool3.restart([1])
    assert dict(pool3.run(KEPT)) == {0: None, 1: None, 2: 12}
    assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}


@pytest.mark.long
def test_a_rank_is_replaced_after_its_fork_server_was_killed(pool3: Pool) -> None:
    server = family(pool3)["fork server"]
    server.kill()
    until(lambda: gone(server.pid), 5.0, "the end of the fork server")
    assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}  # nobody needs it now
    pool3.restart([1])
    assert dict(pool3.run(KEPT)) == {0: 10, 1: None, 2: 12}


def test_a_pool_without_its_controller_cannot_be_mended(pool3: Pool) -> None:
    pids, folder = members(pool3), folder_of(pool3)
    family(pool3)["controller"].kill()
    until(lambda: pool3.status().state == "broken", 2.0)
    with raises(PoolError, "lost", shown="`%gpupool start`"):
        pool3.restart([0])
    pool3.stop()
    assert gone(*pids)
    assert not folder.exists()
    with raises(PoolError, "stopped"):
        pool3.restart([0])


def test_a_controller_that_is_stopped_goes_on_and_no_rank_is_lost(
    pool3: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    before, controller = pool3.status().pids, family(pool3)["controller"]
    cell = pool3.begin("import time; time.sleep(600)", ranks=[0, 1, 2], on_output=lambda *_: None)
    controller.suspend()
    cell.interrupt()
    assert cell.wait(30)
    error = cell.error()
    assert error is not None
    assert error.first.ename == "KeyboardInterrupt"
    assert same_on(error, 0, 1, 2)
    assert (pool3.status().pids, dict(pool3.run(KEPT))) == (before, {0: 10, 1: 11, 2: 12})
    assert (
        f"the controller of the pool (process {controller.pid}) was stopped"
        in capfd.readouterr().err
    )


def test_a_cell_that_runs_meanwhile_ends_and_tells_that_its_rank_was_restarted(pool3: Pool) -> None:
    source = "import time\nif rank == 1: time.sleep(60)\nelse: dist.barrier()"
    cell = pool3.begin(source, ranks=[0, 1, 2], on_output=lambda *_: None)
    until(lambda: pool3.status().state == "busy", 5.0)
    pool3.restart([1])
    assert cell.wait(30)  # the others are told to leave the barrier while rank 1 is on its way
    assert str(cell.errors[1]).endswith("the rank was restarted")
    assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}
    assert dict(pool3.run(KEPT)) == {0: 10, 1: None, 2: 12}


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
    before, server = engine_pid(pool3, 1), family(pool3)["fork server"]
    server.suspend()  # so that the restart is not over before
    thread, failed = restarting(pool3)
    until(lambda: gone(before), 5.0)
    pool3.stop()
    server.resume()
    thread.join(40)  # and not the minute that a new engine has to come up
    assert failed[0].kind == "stopped"


def fork_servers(agent: psutil.Process) -> list[psutil.Process]:
    """A fork server, also one that is just being started."""
    found = []
    for child in agent.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # the rank that is being replaced
            found += [child] * (child.name() in ("python", "gpupool:forks"))
    return found


def test_a_restart_that_fails_costs_the_others_nothing(pool3: Pool) -> None:
    """The rank's new process cannot come: each fork server is killed while it imports torch."""
    agent = family(pool3)["agent"]
    family(pool3)["fork server"].kill()
    until(lambda: "fork server" not in family(pool3), 5.0)
    thread, failed = restarting(pool3)
    while thread.is_alive():
        for server in fork_servers(agent):
            with contextlib.suppress(psutil.NoSuchProcess):
                server.kill()
        time.sleep(0.05)
    assert (failed[0].kind, failed[0].ranks) == ("given up", (1,))
    assert " fork server " in str(failed[0])
    assert "othing was left running" not in str(failed[0])
    pool3.restart([1])
    assert dict(pool3.run(KEPT)) == {0: 10, 1: None, 2: 12}


def test_a_rank_that_dies_during_a_restart_is_replaced_with_it(pool3: Pool) -> None:
    before, server = engine_pid(pool3, 1), family(pool3)["fork server"]
    server.suspend()  # so that the restart is not over before
    thread, failed = restarting(pool3)
    until(lambda: gone(before), 5.0)
    num_losses = pool3._all_ranks.health.num_losses
    os.kill(engine_pid(pool3, 2), signal.SIGKILL)
    until(lambda: pool3._all_ranks.health.num_losses > num_losses, 5.0)
    server.kill()  # and so has the fork server died
    thread.join(120)
    assert (thread.is_alive(), failed) == (False, [])
    assert dict(pool3.run(KEPT)) == {0: 10, 1: None, 2: None}
    assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}


@pytest.mark.parametrize("name", ["", "profile"])
def test_a_private_folder_that_is_removed_is_made_again_and_this_is_said(
    pool3: Pool, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    folder = folder_of(pool3)
    shutil.rmtree(folder.parent if not name else folder / name)
    with pytest.raises(SpmdError, match="ZeroDivisionError"):
        pool3.run("if rank == 1: 1 / 0\ndist.all_reduce(torch.ones(1))")
    assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}
    kill(pool3, 1)
    assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}
    assert dict(pool3.run(KEPT)) == {0: 10, 1: None, 2: 12}
    told = capfd.readouterr().err
    assert told.count(f"the pool's private folder, {folder}, or files in it were removed") == 1
    modes = {path.stat().st_mode & 0o777 for path in (folder / "profile/security").iterdir()}
    assert (folder.parent.stat().st_mode & 0o777, modes) == (0o700, {0o600})
    assert "was removed" in pool3.log(0) or name


def test_a_private_folder_that_nobody_needs_now_is_missed_all_the_same(
    pool3: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(pool3)
    security = folder / "profile/security"
    shutil.rmtree(folder.parent)
    until(lambda: any(security.glob("*.json")), 5.0, "its being made again")
    until(lambda: f"{folder}, or files in it were removed" in capfd.readouterr().err, 5.0)


def test_a_private_folder_that_cannot_be_made_again_costs_no_rank(pool3: Pool) -> None:
    folder = folder_of(pool3).parent
    shutil.rmtree(folder)
    folder.touch()  # as another user may take the name
    with pytest.raises(SpmdError, match="ZeroDivisionError"):
        pool3.run("if rank == 1: 1 / 0\ndist.all_reduce(torch.ones(1))")
    with raises(PoolError, "no group", shown=(str(folder), "`%gpupool stop`")):
        pool3.run(SUM)
    folder.unlink()
    assert dict(pool3.run(KEPT)) == {0: 10, 1: 11, 2: 12}


def test_an_interrupted_restart_goes_on_in_the_background(pool3: Pool) -> None:
    before, server = engine_pid(pool3, 1), family(pool3)["fork server"]
    server.suspend()  # so that the restart is not over before
    watcher = threading.Thread(
        target=lambda: (until(lambda: gone(before), 5.0), os.kill(os.getpid(), signal.SIGINT))
    )
    watcher.start()
    with pytest.raises(KeyboardInterrupt):
        pool3.restart()
    server.resume()
    watcher.join()
    assert dict(pool3.run(KEPT)) == {0: None, 1: None, 2: None}
    assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}


@pytest.mark.parametrize(
    "after_s",
    [0.05, 0.2, *(pytest.param(s, marks=pytest.mark.long) for s in (0.02, 0.1, 0.15, 0.3))],
)
def test_a_restart_cut_off_at_any_moment_is_followed_by_a_whole_pool(
    pool3: Pool, after_s: float
) -> None:
    timer = threading.Timer(after_s, os.kill, [os.getpid(), signal.SIGINT])
    with contextlib.suppress(KeyboardInterrupt):  # it may be over before
        timer.start()
        pool3.restart()
        timer.join()
    timer.join()
    assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}
    pool3.restart()
    assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}
    agent = family(pool3)["agent"]
    until(lambda: len(agent.children()) == 5, 5.0)  # fork server, controller, 3 engines


@pytest.mark.long
def test_many_restarts_in_a_row_all_form_their_group(pool3: Pool) -> None:
    for number in range(6):
        pool3.restart([number % 3])
        assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}


def test_a_restart_interrupts_what_runs_on_the_other_ranks(pool3: Pool, tmp_path: Path) -> None:
    code = f"kept = 7\n{reach(tmp_path / 'rank')}\nwhile True: pass"
    execution = pool3.begin(code, ranks=(0, 2), on_output=lambda *_: None)
    until(lambda: reached(tmp_path / "rank", 0, 2), 5.0)
    began = time.monotonic()
    pool3.restart([1])
    assert time.monotonic() - began < 40
    with pytest.raises(SpmdError, match="KeyboardInterrupt"):
        execution.result()
    assert dict(pool3.run(KEPT)) == {0: 7, 1: None, 2: 7}


def test_what_waits_for_a_rank_that_is_restarted_runs_on_the_new_one(pool2: Pool) -> None:
    running = pool2.begin("import time; time.sleep(600)", ranks=[1], on_output=lambda *_: None)
    waiting = pool2.begin("dist.barrier()", ranks=[0, 1], on_output=lambda *_: None)
    pool2.restart([1])
    assert waiting.wait(60)
    assert waiting.error() is None
    assert "restarted" in str(running.error())
