"""A pool as a notebook meets it: real engines, real signals, real deaths."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ipyparallel
import psutil
import pytest

import gpupool
from gpupool import Pool, PoolError, PoolStartError, SpmdError
from gpupool.core.errors import NoPoolError, OptionsError
from gpupool.core.wire.calls import DebugCommand
from gpupool.pool import session
from gpupool.pool.launchers import starter
from tests.notebook.kernel import plain
from tests.support.processes import engine_pid, family, folder_of, gone, members, until
from tests.support.raising import raises

SUM = "x = torch.ones(1); dist.all_reduce(x); x.item()"
SOON_S = 30.0  # what takes well under a second here, on a machine that has other things to do


# ---- a cell on some ranks --------------------------------------------------------------------


def test_only_the_ranks_asked_for_run(pool2: Pool) -> None:
    result = pool2.run("rank", ranks="-1")
    assert dict(result) == {1: 1}
    with raises(PoolError, " 1.", ranks=(0,)):
        result.text(0)
    assert dict(pool2.run("rank", ranks=[0])) == {0: 0}
    with raises(OptionsError, "ranks", " 0 to 1"):
        pool2.run("rank", ranks=2)


# ---- start and stop --------------------------------------------------------------------------


def test_a_second_start_is_refused_and_the_first_pool_stays(pool2: Pool) -> None:
    shown = (" 2 ranks ", "gpupool.current_pool()", "`%gpupool stop`")
    with raises(PoolError, shown):
        gpupool.start(n=1, device="cpu")
    assert gpupool.current_pool() is pool2
    assert dict(pool2.run(SUM)) == {0: 2.0, 1: 2.0}


def test_the_status_says_who_runs_where(pool2: Pool) -> None:
    status = pool2.status()
    assert (status.state, status.reason, status.backend) == ("idle", "", "gloo")
    assert status.generation == pool2.generation
    assert dict(pool2.run("import os; os.getpid()")) == dict(status.pids)
    assert [rank.device for rank in status.ranks] == ["cpu", "cpu"]
    assert 1700 < (status.idle_left_s or 0) <= 1800
    assert repr(pool2) == "Pool(2 ranks, gloo, idle)"
    assert session.describe(pool2) == "2 ranks on CPU (gloo)"
    assert dict(pool2.run(SUM)) == {0: 2.0, 1: 2.0}


@pytest.fixture
def no_pool() -> Iterator[None]:
    session.stop()
    yield
    session.stop()


def test_stop_leaves_no_process_and_no_folder_and_may_be_repeated(pool2: Pool) -> None:
    pids = members(pool2)
    assert len(pids) >= 3
    folder = folder_of(pool2)
    assert folder.stat().st_mode & 0o777 == 0o700
    pool2.stop()
    assert gone(*pids)
    assert not folder.exists()
    pool2.stop()
    assert pool2.status().state == "stopped"
    with raises(PoolError, "`%gpupool start`"):
        pool2.run("1")
    with raises(NoPoolError, "`%gpupool start` (gpupool.start())"):
        gpupool.current_pool()


def test_a_pool_that_nobody_uses_warns_and_stops_itself(no_pool: None) -> None:
    pool = gpupool.start(n=1, device="cpu", idle_timeout="1s")
    heard: list[tuple[str, bool]] = []
    pool.add_listener(lambda status: heard.append((status.state, status.stops_soon)))
    pid = engine_pid(pool, 0)
    pool.run("import time; time.sleep(1.5)")  # being busy is use
    assert pool.status().state == "idle"
    until(lambda: gone(pid), SOON_S, "the idle pool's end")
    until(lambda: heard[-1:] == [("stopped", False)], SOON_S)
    assert ("idle", True) in heard
    with raises(NoPoolError, "", shown="stopped after 1s without use"):
        gpupool.current_pool()


def test_a_start_without_enough_time_leaves_nothing(
    no_pool: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter.close()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where its folder is made
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with raises(PoolStartError, " 0.3 s", "--timeout"):
        gpupool.start(n=2, device="cpu", timeout_s=0.3)  # in the starter's start
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert gone(*(after - before))
    assert list(tmp_path.iterdir()) == []
    assert session.find() is None


def test_files_have_the_notebooks_mode_and_forked_ranks_draw_different_numbers(
    pool2: Pool, tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        pool2.restart()
    finally:
        os.umask(before)
    pool2.run(f"open({str(tmp_path / 'file')!r} + str(rank), 'w').close()")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
    draw = (
        "import random, uuid, numpy as np\n(random.random(), np.random.rand(), str(uuid.uuid4()))"
    )
    first, second = pool2.run(draw).values()
    assert all(one != other for one, other in zip(first, second, strict=True))


# ---- others on its ranks, memory, deaths -----------------------------------------------------


def test_a_cell_comes_after_what_a_plain_client_has_asked_of_its_ranks(pool2: Pool) -> None:
    sleep = pool2.client[1].apply_async(time.sleep, 600)
    assert dict(pool2.run("rank", ranks=0)) == {0: 0}
    cell = pool2.begin(SUM, ranks=[0, 1], on_output=lambda *_: None)
    assert not cell.wait(0.5)
    pool2.client.send_signal("SIGINT", targets=[1], block=True)
    assert {rank: reply.text for rank, reply in cell.result().items()} == {0: "2.0", 1: "2.0"}
    with pytest.raises(ipyparallel.RemoteError, match="KeyboardInterrupt"):
        sleep.get(20)


HELD = """
import gc
class Net:
    def forward(self):
        activations = torch.ones(3, 2**20)                 # 12 MiB
        raise MemoryError
"""
LEFT = (
    "[t.shape[0] for t in gc.get_objects() if type(t) is torch.Tensor and t.numel() == 3 * 2**20]"
)


def test_what_has_failed_keeps_no_memory_and_the_debugger_says_so(pool2: Pool) -> None:
    def said_after(source: str) -> str:
        with pytest.raises(SpmdError):
            pool2.run(source, timeout_s=60)
        return plain(pool2.engines.call(0, DebugCommand(None)).result(10).value.text)

    pool2.run(HELD)
    assert said_after("Net().forward()").startswith("There is nothing to look at: ")
    assert dict(pool2.run(LEFT)) == {0: [], 1: []}
    assert "1 / 0" in said_after("1 / 0")


def test_a_rank_that_has_lost_its_gpu_context_is_replaced_before_the_next_cell_begins(
    pool2: Pool,
) -> None:
    lost = "from gpupool.engine.cells import errors\nerrors.is_context_lost = lambda *errors: True"
    pool2.run(lost, ranks=0)
    before = pool2.status().pids
    with pytest.raises(SpmdError, match="ZeroDivisionError"):
        pool2.run("1 / 0")
    now = dict(pool2.run("import os; os.getpid()"))
    assert now == dict(pool2.status().pids)
    assert [now[rank] == before[rank] for rank in (0, 1)] == [False, True]


def test_a_lost_controller_is_an_error_and_no_hang(pool2: Pool) -> None:
    everyone, pids, folder = family(pool2), members(pool2), folder_of(pool2)
    code = "import time; time.sleep(60)"
    cell = pool2.begin(code, ranks=(0, 1), on_output=lambda *_: None)
    until(lambda: pool2.status().state == "busy", SOON_S)
    everyone["controller"].kill()
    assert cell.wait(SOON_S)
    with raises(SpmdError, "SIGKILL", ename="EngineDiedError"):
        cell.result()
    until(lambda: pool2.status().state == "broken", SOON_S)
    pool2.stop()
    until(lambda: gone(*pids), SOON_S, "the end of all processes")
    assert not folder.exists()
