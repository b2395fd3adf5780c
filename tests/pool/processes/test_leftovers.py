"""What a crash can leave: killed together, the notebook and its agent end nothing any more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupool import Pool, PoolOptions
from gpupool.core.machine.processes import ProcessId
from gpupool.pool.processes.leftovers import reap
from tests.support.processes import folder_of, gone, notebook, until

CRASH = """
import json, os, subprocess, sys, tempfile, time
import gpupool
tempfile.tempdir = sys.argv[1]
pool = gpupool.start(n=2, device="cpu")
pool.run("import subprocess")
pool.run("child = subprocess.Popen(['sleep', '60'], start_new_session=True)", ranks=1)
sleeping = pool.run("child.pid", ranks=1)[1]
from tests.support.processes import family, folder_of
everyone = {name: process.pid for name, process in family(pool).items()}
told = {"pids": everyone, "sleeping": sleeping, "folder": str(folder_of(pool).parent)}
print(json.dumps(told), flush=True)
time.sleep(60)
"""


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path)
    yield tmp_path
    tempfile.tempdir = before


def test_a_crash_of_everything_is_ended_and_named_at_the_next_start(
    scratch: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    client = notebook(CRASH, str(scratch))
    assert client.stdout is not None
    with client.stdout:
        told = json.loads(client.stdout.readline())
    assert reap() == ""  # while its agent lives it is somebody's pool
    agent = told["pids"]["agent"]
    for pid in (agent, client.pid):
        os.kill(pid, signal.SIGSTOP)  # neither sees the other die
    for pid in (agent, client.pid):
        os.kill(pid, signal.SIGKILL)
    client.wait(60)
    engines = [pid for name, pid in told["pids"].items() if name.startswith("rank")]
    until(lambda: gone(*engines, agent), 3.0, "the end of the engines by PDEATHSIG")
    assert not gone(told["sleeping"])
    assert Path(told["folder"]).exists()
    with Pool(PoolOptions(n=1, device="cpu")):
        ended = f"ended what an earlier pool had left in a crash: sleep (pid {told['sleeping']})"
        assert ended in capfd.readouterr().err
        assert gone(told["sleeping"], *told["pids"].values())
        assert not Path(told["folder"]).exists()
    assert reap() == ""


def test_another_process_that_has_the_pid_by_now_is_left_alone(scratch: Path) -> None:
    me = ProcessId.of(os.getpid())
    folder = scratch / "gpupool-dead"
    folder.mkdir(mode=0o700)
    state = {"agent": [me.pid, 1], "client": [me.pid, 1], "rank 0": [me.pid, me.started - 1]}
    (folder / "processes.json").write_text(json.dumps(state))
    assert reap() == ""
    assert not folder.exists()  # nothing of that pool lives
    ProcessId(me.pid, me.started - 1).kill()  # would be the end of this test


def test_a_script_that_a_crashed_pool_has_started_does_not_end_itself(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = scratch / "gpupool-dead"
    folder.mkdir(mode=0o700)
    me = ProcessId.of(os.getpid())
    state = {"agent": [1, 1], "client": [1, 1], "rank 0": [me.pid, me.started]}
    (folder / "processes.json").write_text(json.dumps(state))
    monkeypatch.setenv("GPUPOOL_FOLDER", str(folder))
    assert reap() == ""
    assert folder.exists()


def test_other_folders_of_the_same_name_stay(scratch: Path) -> None:
    for name in ("gpupool-notes", "gpupool-fresh"):
        (scratch / name).mkdir(mode=0o700)
    (scratch / "gpupool-notes" / "processes.json").write_text("[1, 2]")
    (scratch / "gpupool-file").write_text("")
    assert reap() == ""
    assert len(list(scratch.iterdir())) == 3


def test_a_folder_that_others_may_write_to_is_no_agents(scratch: Path) -> None:
    """What is in it does nothing: neither a state that tells to remove it, nor a pipe."""
    for name in ("gpupool-state", "gpupool-pipe"):
        (scratch / name).mkdir()
        (scratch / name).chmod(0o777)
    state = {"agent": [1, 1], "client": [1, 1]}
    (scratch / "gpupool-state" / "processes.json").write_text(json.dumps(state))
    os.mkfifo(scratch / "gpupool-pipe" / "processes.json")
    assert reap() == ""
    assert len(list(scratch.iterdir())) == 2


def test_another_users_process_is_neither_named_nor_killed(scratch: Path) -> None:
    """Root could read its environment, which names a folder of a pool."""
    if os.getuid() != 0:
        pytest.skip("needs root, to be another user as well")
    folder = scratch / "gpupool-dead"
    folder.mkdir(mode=0o700)
    (folder / "processes.json").write_text(json.dumps({"agent": [1, 1], "client": [1, 1]}))
    with subprocess.Popen(
        ["/bin/sleep", "60"], env={"GPUPOOL_FOLDER": str(folder)}, cwd="/", user=12001, group=12001
    ) as process:
        try:
            assert reap() == ""
            assert process.poll() is None
        finally:
            process.kill()


def test_a_pool_in_another_container_that_shares_the_folder_for_temporary_files_stays(
    pool2: Pool,
) -> None:
    folder = folder_of(pool2).parent
    look = "from gpupool.pool.processes.leftovers import reap; print(repr(reap()))"
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", look]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unshare" in done.stderr:
        pytest.skip(f"needs a namespace of process ids: {done.stderr.strip()}")
    assert done.stdout == "''\n"
    assert folder.exists()
