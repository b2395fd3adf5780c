"""Hosts from schedulers that are shims (tests/support/shims.py): got, held, lost, given back."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpupool.core.errors import PoolError, PoolStartError
from gpupool.core.options.clusters import Cluster, cluster_of
from gpupool.core.options.pool_options import PoolOptions
from gpupool.pool.launchers.allocation import Allocation
from tests.support import shims
from tests.support.processes import gone, notebook, until
from tests.support.raising import raises

SLURM: dict[str, Any] = {"profile": "slurm", "n": 4, "words": ("-p", "gpu", "-t", "9")}
PODS = {"profile": "kubernetes", "n": 4, "hosts": ("2",), "words": ("--context", "lab")}
HOLD = f"""
import sys, time
from gpupool.core.options.clusters import cluster_of
from gpupool.core.options.pool_options import PoolOptions
from gpupool.pool.launchers.allocation import Allocation
hold = Allocation(cluster_of(PoolOptions(**{SLURM})), lambda text: print(text, flush=True))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of shims that are first on PATH; when the test is over, nothing is left."""
    (tmp_path / "bin").mkdir()
    for name in shims.NAMES:
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {shims.__file__} {name} "$@"\n')
        command.chmod(0o755)
    (tmp_path / "gpupool.toml").write_text("[kubernetes]\nimage = 'x'")
    (tmp_path / "gpupool.toml").chmod(0o644)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SHIMS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before, files = psutil.Process().children(recursive=True), os.listdir("/proc/self/fd")
    yield tmp_path
    until(lambda: psutil.Process().children(recursive=True) == before, 5.0, "their end")
    assert len(os.listdir("/proc/self/fd")) == len(files)


@pytest.fixture
def allowed(shim: Path) -> Path:
    """The same; what is asked for is there at once."""
    (shim / "allowed").touch()
    return shim


def cluster(**options: Any) -> Cluster:
    found = cluster_of(PoolOptions(**options))
    assert found is not None
    return found


def allow_after(shim: Path, *parts: str) -> Callable[[str], None]:
    """What hears how it stands, and lets it be granted when that has these parts."""
    return lambda text: (shim / "allowed").touch() if all(p in text for p in parts) else None


def output(hold: Allocation, host: str) -> str:
    command = hold.wrapped(host, ["sh", "-c", "echo $HOST 'a  b'"])
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_slurm_gives_hosts_and_gets_them_back(allowed: Path) -> None:
    hold = Allocation(cluster(**SLURM))
    assert (hold.job, hold.hosts) == ("4711", [("node01", 2), ("node02", 2)])
    assert output(hold, "node02") == "node02 a  b\n"
    hold.close()
    hold.close()
    assert shims.state(allowed).startswith("COMPLETED")


def test_waiting_is_said(shim: Path) -> None:
    Allocation(cluster(**SLURM), allow_after(shim, "job 4711", "2031-11-26 14:05")).close()


def test_a_rejection_is_the_schedulers_own_sentence() -> None:
    with raises(PoolStartError, "Invalid partition name specified"):
        Allocation(cluster(profile="slurm", n=1))
    with raises(PoolStartError, os.strerror(errno.E2BIG)):
        Allocation(cluster(profile="slurm", n=1, words=("x" * 200_000,)))


@pytest.mark.parametrize("how", [PoolError, KeyboardInterrupt])
def test_stop_while_it_waits_leaves_no_job(shim: Path, how: type[BaseException]) -> None:
    waits: list[str] = []

    def say(text: str) -> None:
        waits.extend(["4711"] * ("4711" in text))
        if waits and how is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(how):
        Allocation(cluster(**SLURM), say, lambda: bool(waits))
    assert shims.state(shim).startswith("CANCELLED")


@pytest.mark.parametrize("state", ["TIMEOUT|TimeLimit", "COMPLETING|TimeLimit", "CANCELLED|None"])
def test_the_end_of_a_job_is_named(allowed: Path, state: str) -> None:
    ends: list[str] = []
    hold = Allocation(cluster(**SLURM), on_end=ends.append)
    shims.put(f"{state}|N/A|N/A", allowed)
    until(lambda: bool(ends), 10.0, "its being told")
    assert "4711" in ends[0]
    assert state.partition("|")[0].replace("COMPLETING", "TIMEOUT") in ends[0]
    hold.close()


def test_a_job_whose_holder_is_killed_is_cancelled(allowed: Path) -> None:
    ends: list[str] = []
    hold = Allocation(cluster(**SLURM), on_end=ends.append)
    (salloc,) = (one for one in psutil.Process().children() if "salloc" in one.cmdline())
    salloc.kill()
    until(lambda: bool(ends), 10.0, "its being told")
    assert "CANCELLED" in ends[0]
    hold.close()


@pytest.mark.parametrize("waits", [True, False])
def test_a_killed_notebook_leaves_no_job(shim: Path, waits: bool) -> None:
    if not waits:
        (shim / "allowed").touch()
    with notebook(HOLD) as client:
        assert client.stdout is not None
        assert any(("4711: waiting" if waits else "held") in line for line in client.stdout)
        below = [one.pid for one in psutil.Process(client.pid).children(recursive=True)]
        client.kill()
    until(lambda: gone(*below), 5.0, "their end")
    assert shims.state(shim).startswith(("CANCELLED", "COMPLETED"))


def test_the_time_limit_is_announced_once(allowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = datetime.now() + timedelta(seconds=100)
    monkeypatch.setenv("SHIM_END", f"{end:%Y-%m-%dT%H:%M:%S}")
    notices: list[str] = []
    hold = Allocation(cluster(**SLURM), on_notice=notices.append)
    until(lambda: bool(notices), 5.0, "the notice")
    assert "4711" in notices[0]
    assert f"{end:%H:%M}" in notices[0]
    hold.close()
    assert len(notices) == 1


def test_a_command_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with raises(PoolStartError, "salloc"):
        Allocation(cluster(**SLURM))


def test_pods(shim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = Allocation(cluster(**PODS), allow_after(shim, "Insufficient nvidia.com/gpu"))
    assert hold.hosts == [(f"{hold.job}-{i}", None) for i in range(2)]
    assert output(hold, f"{hold.job}-1") == f"{hold.job}-1 a  b\n"
    hold.close()
    assert shims.state(shim) == ""
    (shim / "allowed").unlink()
    with raises(PoolError):
        Allocation(cluster(**PODS), is_stopped=lambda: shims.state(shim) != "")
    assert shims.state(shim) == ""
    monkeypatch.setenv("SHIM_FAILED", "1")
    with raises(PoolStartError, "python3: not found"):
        Allocation(cluster(**PODS))


def test_machines_of_a_cloud_stay_until_they_are_taken_down(shim: Path) -> None:
    sky = cluster(profile="sky", hosts=("2",), words=("--gpus", "H100:8"))
    hold = Allocation(sky)
    assert hold.hosts == [("gpupool-sky", None), ("gpupool-sky-worker1", None)]
    assert output(hold, "gpupool-sky-worker1") == "gpupool-sky-worker1 a  b\n"
    hold.close()
    assert shims.state(shim) == "UP"
    subprocess.run(sky.down.split(), check=True)
    assert shims.state(shim) == ""
