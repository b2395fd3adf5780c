"""Device locks among real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpupool.core.locks import DeviceLocks, lock_folder

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
