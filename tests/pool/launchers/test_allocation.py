"""Hosts that a scheduler gives: got, held, lost, given back. Real ones do so in tests/hosts."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpupool.core.errors import PoolError, PoolStartError
from gpupool.core.options.clusters import Cluster, cluster_of
from gpupool.core.options.pool_options import PoolOptions
from gpupool.pool.launchers.allocation import Allocation
from tests.support.processes import notebook, until
from tests.support.raising import raises

FILE = """
[own]
hold = '''sh -c 'echo submitted job 7; until [ -e allowed ]; do sleep 0.02; done
  echo gpupool 7 node1 node2:2; cat; true' '''
run = "env HOST={host} RANKS={ranks} sh -c"
state = "cat job"
cancel = "sh -c 'echo CANCELLED {job} > job'"
[kubernetes]
image = "x"
hosts = 2
words = ["--context", "lab"]
"""
COMMANDS = {  # as their manuals have them; what they are not meant to be told fails
    "kubectl": """
[ "$1 $2" = "--context lab" ] || exit 2
shift 2
case "$*" in
"apply -f -") cat > /dev/null; echo "Pending|3 Insufficient nvidia.com/gpu" > job ;;
"get pods -l job-name="*" --field-selector=status.phase=Pending -o "*) cat job ;;
"get pods -l job-name="*" --field-selector=status.phase=Running -o "*)
  if [ -e allowed ]; then echo ${4#*=}-0 ${4#*=}-1; fi ;;
"get job "*" -o jsonpath={.status.failed}") if [ -e failed ]; then echo 1; fi ;;
"logs job/"*) echo "python3: not found" ;;
"delete job "*" --ignore-not-found --wait=false") rm -f job ;;
"exec -i "*" -- "*) export HOST=$3; shift 4; exec "$@" ;;
*) exit 2 ;;
esac
""",
    "sky": """
case "$*" in
"launch -y -c gpupool-sky --num-nodes 2 -i 30 --down --gpus H100:8") touch job ;;
"down -y gpupool-sky") rm job ;;
*) exit 2 ;;
esac
""",
    "ssh": 'shift 9; export HOST=$1; exec sh -c "$2"',
}
JOB, ALLOWED = Path("job"), Path("allowed")
KILLED = """
import os, signal
from gpupool.core.options.clusters import cluster_of
from gpupool.core.options.pool_options import PoolOptions
from gpupool.pool.launchers.allocation import Allocation
hold = Allocation(cluster_of(PoolOptions(profile="kubernetes", n=4)))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One in which `job` has the job's state, and `allowed` lets it begin; then nothing is left."""
    for name, script in COMMANDS.items():
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\n{script}")
        command.chmod(0o755)
    (tmp_path / "gpupool.toml").write_text(FILE)
    (tmp_path / "gpupool.toml").chmod(0o644)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    before, files = psutil.Process().children(recursive=True), os.listdir("/proc/self/fd")
    yield
    until(lambda: psutil.Process().children(recursive=True) == before, 5.0, "their end")
    assert len(os.listdir("/proc/self/fd")) == len(files)


def cluster(profile: str, **options: Any) -> Cluster:
    found = cluster_of(PoolOptions(profile=profile, **options))
    assert found is not None
    return found


def allow_after(*parts: str) -> Callable[[str], None]:
    """What hears how it stands, and lets the job begin when that has these parts."""
    return lambda text: ALLOWED.touch() if all(p in text for p in parts) else None


def output(hold: Allocation, host: str) -> str:
    command = hold.wrapped(host, ["sh", "-c", "echo $HOST $RANKS 'a  b'"])
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_command_lines_of_ones_own() -> None:
    JOB.write_text("PENDING|Resources|2031-11-26T14:05:00|N/A")
    hold = Allocation(cluster("own"), allow_after("job 7", "resources", "2031-11-26 14:05"))
    assert (hold.job, hold.hosts) == ("7", [("node1", None), ("node2", 2)])
    assert output(hold, "node2") == "node2 2 a  b\n"
    hold.close()
    hold.close()
    assert "CANCELLED" not in JOB.read_text()


def test_pods() -> None:
    hold = Allocation(cluster("kubernetes", n=4), allow_after("Insufficient nvidia.com/gpu"))
    assert hold.hosts == [(f"{hold.job}-{i}", None) for i in range(2)]
    assert output(hold, f"{hold.job}-1") == f"{hold.job}-1 a  b\n"
    hold.close()
    assert not JOB.exists()
    ALLOWED.unlink()
    with raises(PoolError):
        Allocation(cluster("kubernetes", n=4), is_stopped=JOB.exists)
    assert not JOB.exists()
    Path("failed").touch()
    with raises(PoolStartError, "python3: not found"):
        Allocation(cluster("kubernetes", n=4))
    with raises(PoolStartError, os.strerror(errno.E2BIG)):
        Allocation(cluster("sky", words=("x" * 200_000,)))


def test_a_notebook_that_is_killed_leaves_no_pod() -> None:
    ALLOWED.touch()
    with notebook(KILLED) as client:
        assert client.wait(60.0) == -signal.SIGKILL
    until(lambda: not JOB.exists(), 5.0, "its end")


def test_machines_of_a_cloud_stay_until_they_are_taken_down() -> None:
    sky = cluster("sky", hosts=("2",), words=("--gpus", "H100:8"))
    hold = Allocation(sky)
    assert hold.hosts == [("gpupool-sky", None), ("gpupool-sky-worker1", None)]
    assert output(hold, "gpupool-sky-worker1") == "gpupool-sky-worker1 a  b\n"
    hold.close()
    assert JOB.exists()
    subprocess.run(sky.down.split(), check=True)
    assert not JOB.exists()
