"""Device locks among real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpupool.core.locks import DeviceLocks, lock_folder, locked_text

OWNER = {"pid": os.getpid(), "user": "me"}
HOLD = """
import sys
from pathlib import Path
from gpupool.core.locks import DeviceLocks
locks = DeviceLocks(Path(sys.argv[1]))
taken, others = locks.take(sys.argv[2:], len(sys.argv) - 2, {"pid": 4711, "user": "somebody"})
print(taken, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def locks(tmp_path: Path) -> DeviceLocks:
    return DeviceLocks(tmp_path)


def holder(folder: Path, *devices: str) -> subprocess.Popen[str]:
    """Another process that holds these devices until its stdin closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *devices],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"{list(devices)}\n"
    return process


def test_free_devices_are_taken_in_order(locks: DeviceLocks) -> None:
    assert locks.take(["GPU-a", "GPU-b", "GPU-c"], 2, OWNER) == (["GPU-a", "GPU-b"], {})
    locks.release()


def test_a_device_in_use_is_refused_with_its_owner_and_since_when(
    locks: DeviceLocks, tmp_path: Path
) -> None:
    with holder(tmp_path, "GPU-a"):
        taken, others = locks.take(["GPU-a", "GPU-b"], 2, OWNER)
        assert taken == []
        assert (others["GPU-a"]["pid"], others["GPU-a"]["user"]) == (4711, "somebody")
        assert 0 <= time.time() - others["GPU-a"]["since"] < 60
        # nothing was kept of a refused request
        with holder(tmp_path, "GPU-b"):
            pass


def test_another_free_device_is_found(locks: DeviceLocks, tmp_path: Path) -> None:
    with holder(tmp_path, "GPU-a"):
        taken, others = locks.take(["GPU-a", "GPU-b", "GPU-c"], 1, OWNER)
        assert (taken, list(others)) == (["GPU-b"], ["GPU-a"])
    locks.release()


def test_force_shares_it(locks: DeviceLocks, tmp_path: Path) -> None:
    with holder(tmp_path, "GPU-a"):
        taken, others = locks.take(["GPU-a"], 1, OWNER, force=True)
        assert (taken, list(others)) == (["GPU-a"], ["GPU-a"])
    locks.release()


def test_a_killed_owner_lets_go(locks: DeviceLocks, tmp_path: Path) -> None:
    with holder(tmp_path, "GPU-a") as process:
        process.kill()
    assert locks.take(["GPU-a"], 1, OWNER) == (["GPU-a"], {})
    locks.release()


def test_every_user_may_lock_and_a_link_is_not_followed(locks: DeviceLocks, tmp_path: Path) -> None:
    before = os.umask(0o077)
    locks.take(["MIG-a/1"], 1, OWNER)
    os.umask(before)
    (path,) = tmp_path.iterdir()
    assert path.name == "gpupool-MIG-a-1.lock"
    assert path.stat().st_mode & 0o777 == 0o666
    assert json.loads(path.read_text())["user"] == "me"
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / "gpupool-GPU-b.lock").symlink_to(precious)
    (tmp_path / "gpupool-GPU-c.lock").hardlink_to(precious)
    for device in ("GPU-b", "GPU-c"):
        with pytest.raises(OSError):
            locks.take([device], 1, OWNER)
    assert precious.read_text() == "keep"
    locks.release()


def test_lock_files_lie_where_every_user_may_write() -> None:
    assert lock_folder().stat().st_mode & 0o1002 == 0o1002


@pytest.mark.parametrize(
    "text",
    ["5", "[1, 2]", '{"pid": 1}', '{"pid": 1, "user": "\\u001b[2J", "since": 0}']
    + [f'{{"pid": 1, "user": "x", "since": {since}}}' for since in ('"now"', "1e300", "null")],
)
def test_nonsense_that_anybody_wrote_about_the_owner_is_not_shown(
    locks: DeviceLocks, tmp_path: Path, text: str
) -> None:
    with holder(tmp_path, "GPU-a"):
        (tmp_path / "gpupool-GPU-a.lock").write_text(text)
        taken, others = locks.take(["GPU-a"], 1, OWNER)
    assert (taken, others) == ([], {"GPU-a": {}})
    assert "other pools use GPU-a by process ? of ?." in locked_text(others, 1, 1)


def test_a_full_disk_neither_hinders_a_lock_nor_keeps_it(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(tmp_path)])
    if mounted.returncode != 0:
        pytest.skip("needs to mount a tmpfs")
    try:
        with (tmp_path / "filler").open("wb", 0) as filler:
            filler.write(b"x" * 8192)  # cut short
        locks, others = DeviceLocks(tmp_path), DeviceLocks(tmp_path)
        assert locks.take(["GPU-a"], 1, OWNER) == (["GPU-a"], {})
        assert others.take(["GPU-a"], 1, OWNER) == ([], {"GPU-a": {}})
        locks.release()
        assert others.take(["GPU-a"], 1, OWNER) == (["GPU-a"], {})
        others.release()
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_folder_that_cannot_be_written_to_is_not_for_locks() -> None:
    """As in a container with a read-only file system."""
    script = (
        "mount -t tmpfs -o ro,mode=1777 tmpfs /run/lock && exec "
        f"{sys.executable} -c 'from gpupool.core.locks import lock_folder; print(lock_folder())'"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"needs a mount namespace: {done.stderr.strip()}")
    assert done.stdout == "/tmp\n"


def test_a_released_device_is_free_though_a_process_forked_meanwhile_lives_on(
    locks: DeviceLocks, tmp_path: Path
) -> None:
    assert locks.take(["GPU-a"], 1, OWNER) == (["GPU-a"], {})
    heir = os.fork()
    if heir == 0:
        time.sleep(60)  # has the descriptor, as a worker that multiprocessing forks
        os._exit(0)
    leaver = os.fork()
    if leaver == 0:
        locks.release()  # has no say: the device is its parent's
        os._exit(0)
    other = DeviceLocks(tmp_path)
    try:
        os.waitpid(leaver, 0)
        assert other.take(["GPU-a"], 1, OWNER)[0] == []
        locks.release()
        assert other.take(["GPU-a"], 1, OWNER) == (["GPU-a"], {})
        other.release()
    finally:
        os.kill(heir, signal.SIGKILL)
        os.waitpid(heir, 0)
