"""What a crash can leave: killed together, the notebook and its agent remove nothing any more."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest

from gpupool import Pool, PoolOptions
from gpupool.pool.processes import agent
from tests.support.processes import folder_of, gone, notebook, until

CRASH = """
import json, sys, tempfile, time
import gpupool
tempfile.tempdir = sys.argv[1]
pool = gpupool.start(n=2, device="cpu")
from tests.support.processes import family, folder_of
everyone = {name: process.pid for name, process in family(pool).items()}
print(json.dumps({"pids": everyone, "folder": str(folder_of(pool).parent)}), flush=True)
time.sleep(60)
"""


def make_old(folder: Path) -> None:
    os.utime(folder, (0, 0))


@pytest.mark.long
def test_the_folder_of_a_crash_of_everything_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = notebook(CRASH, str(tmp_path))
    assert client.stdout is not None
    with client.stdout:
        told = json.loads(client.stdout.readline())
    folder, host_agent = Path(told["folder"]), told["pids"]["agent"]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make_old(folder)
    agent._remove_abandoned()
    assert folder.exists()  # while its agent lives
    for pid in (host_agent, client.pid):
        os.kill(pid, signal.SIGSTOP)  # neither sees the other die
    for pid in (host_agent, client.pid):
        os.kill(pid, signal.SIGKILL)
    client.wait(60)
    until(lambda: gone(*told["pids"].values()), 3.0, "the end of all processes by PDEATHSIG")
    os.utime(folder)
    agent._remove_abandoned()
    assert folder.exists()  # an agent that has just been started does not hold its folder yet
    make_old(folder)
    agent.close()  # one that is warm already has looked
    with Pool(PoolOptions(n=1, device="cpu")) as pool:
        assert not folder.exists()
        assert folder_of(pool).exists()


def test_other_folders_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own, target = tmp_path / "gpupool-0", tmp_path / "of the user"
    own.mkdir(mode=0o700)
    target.mkdir()
    (tmp_path / f"{agent._PREFIX}link").symlink_to(target)
    (tmp_path / f"{agent._PREFIX}file").touch()
    theirs = tmp_path / f"{agent._PREFIX}theirs"
    theirs.mkdir()
    if os.geteuid() == 0:
        os.chown(theirs, 12001, 12001)
        make_old(theirs)
    make_old(own)
    make_old(target)
    make_old(tmp_path / f"{agent._PREFIX}file")
    agent._remove_abandoned()
    assert len(list(tmp_path.iterdir())) == 5
