"""The real starter with small children: nothing is ever left running."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpupool.core.machine.locks import lock_folder
from tests.support.processes import PATIENCE, gone, until

ROOT = Path(__file__).parents[2]
GONE_S = 3.0  # the promise: everything is gone within this time, where nothing else runs


class StarterUnderTest:
    """A starter, its children, and the line to it. Its client is `client_pid`."""

    def __init__(self, folder: Path, *modules: str, client_pid: int = 0, warm_s: float = 600.0):
        self.folder = folder
        self.pool_folder = folder / "pool1"
        arguments = [str(folder), str(client_pid or os.getpid()), str(warm_s), *modules]
        folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpupool.host.starter", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
        )
        self.pids: dict[str, int] = {}
        self.open()

    def open(self) -> None:
        self.pool_folder.mkdir()
        env = {"PATH": os.environ["PATH"], "OF_POOL": "all"}
        self.send(kind="open", folder=str(self.pool_folder), env=env)

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")

    def event(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def ask(self, function: str, name: str = "rank 0", **env: str) -> None:
        """Ask for a process without waiting for it."""
        target = f"tests.host.children:{function}"
        log = str(self.log_path(name))
        self.send(kind="spawn", name=name, target=target, argv=["--an-option"], env=env, log=log)

    def spawn(self, function: str, name: str = "rank 0", **env: str) -> int:
        self.ask(function, name, **env)
        event = self.event()
        assert (event["kind"], event["name"]) == ("spawned", name)
        self.pids[name] = event["pid"]
        return int(event["pid"])

    def log_path(self, name: str) -> Path:
        return self.pool_folder / f"{name}.log"

    def log(self, text: str, name: str = "rank 0") -> str:
        """Wait until a child has printed something; all it has printed so far."""
        path = self.log_path(name)
        until(lambda: path.exists() and text in path.read_text(), 10.0)
        return path.read_text()

    def grandchildren(self, name: str = "rank 0") -> list[int]:
        """The pids that `fork_two` has printed."""
        return [int(pid) for pid in self.log("children", name).split()[1:]]

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self) -> None:
        """After a test, whatever it found."""
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
                    child.kill()
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[StarterUnderTest]:
    starter = StarterUnderTest(tmp_path / "starter", "tests.host.children")
    assert starter.event() == {"kind": "ready"}
    yield starter
    starter.end()


# ---- nothing is left -------------------------------------------------------------------------


def test_client_gone_then_nothing_is_left_whatever_it_is_doing(starter: StarterUnderTest) -> None:
    for function in ("sleep", "deaf", "hold_the_gil"):
        starter.spawn(function, function)
        starter.log("up", function)
    starter.spawn("fork_two")
    pids = [*starter.pids.values(), *starter.grandchildren()]
    os.kill(starter.pids["sleep"], signal.SIGSTOP)
    assert not any(gone(pid) for pid in pids)
    starter.hang_up()
    until(lambda: gone(*pids), GONE_S)
    starter.process.wait(PATIENCE * GONE_S)
    assert not starter.folder.exists()


def test_a_dead_client_is_noticed_though_a_child_it_forked_holds_the_pipe_open(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(["sleep", "60"]) as client:  # this process holds the pipe
        starter = StarterUnderTest(tmp_path / "starter", client_pid=client.pid)
        assert starter.event() == {"kind": "ready"}
        pid = starter.spawn("sleep")
        client.kill()
        client.wait()
        until(lambda: gone(pid), GONE_S)
        starter.process.wait(PATIENCE * GONE_S)
        starter.end()


@pytest.mark.long
def test_a_starter_that_nobody_uses_goes_away_by_itself(tmp_path: Path) -> None:
    starter = StarterUnderTest(tmp_path / "starter", warm_s=2.0)
    assert starter.event() == {"kind": "ready"}
    time.sleep(3.0)
    assert starter.process.poll() is None  # while a pool is open it stays
    starter.send(kind="stop")
    assert starter.event() == {"kind": "stopped"}
    starter.process.wait(PATIENCE * GONE_S)
    assert not starter.folder.exists()
    starter.end()


# ---- ends are told ---------------------------------------------------------------------------


def test_of_a_crash_its_frames_are_told_and_not_again_of_who_comes_after_it(
    starter: StarterUnderTest,
) -> None:
    starter.spawn("crash")
    event = starter.event()
    assert event["status"] == -signal.SIGSEGV
    assert event["log_tail"].startswith("Fatal Python error: Segmentation fault")
    pid = starter.spawn("sleep")  # with the same log
    starter.log("\nup\n")
    os.kill(pid, signal.SIGKILL)
    event = starter.event()
    assert event.pop("log_tail") == "up"
    assert event == {"kind": "exited", "name": "rank 0", "status": -9, "cause": ""}


def test_what_a_dead_child_had_forked_goes_with_it(starter: StarterUnderTest) -> None:
    pid = starter.spawn("fork_two")
    in_its_group, in_a_session_of_its_own = starter.grandchildren()
    os.kill(pid, signal.SIGKILL)
    assert starter.event()["status"] == -9
    until(lambda: gone(in_its_group), GONE_S)
    starter.send(kind="stop")
    assert starter.event() == {"kind": "stopped"}
    assert gone(in_a_session_of_its_own)


# ---- stop and kill ---------------------------------------------------------------------------


def test_stop_asks_first_kills_what_does_not_hear_and_leaves_the_starter_warm(
    starter: StarterUnderTest,
) -> None:
    for number in range(20):  # on a machine with much to do it may not come to say that in 0.4 s
        pids = (
            starter.spawn("deaf"),
            starter.spawn("sleep", "rank 1"),
            starter.spawn("fork_two", "c"),
        )
        starter.log("up")
        children = starter.grandchildren("c")
        copy = starter.folder.parent / f"log{number}"
        os.link(starter.log_path("rank 0"), copy)  # the pool's folder goes with it
        for rank in range(10):
            starter.ask("sleep", f"on its way {rank}")
        starter.send(kind="stop")
        while starter.event() != {"kind": "stopped"}:
            pass
        assert gone(*pids, *children)
        assert psutil.Process(starter.process.pid).children() == []
        assert not starter.pool_folder.exists()
        if "told" in copy.read_text():
            break
        starter.open()
    assert "told" in copy.read_text()  # it was asked first


def test_a_kill_also_ends_what_is_on_its_way_and_the_name_is_free_again(
    starter: StarterUnderTest,
) -> None:
    names = [f"rank {number}" for number in range(5)]
    for _ in range(3):
        for name in names:
            starter.ask("sleep", name)
        starter.send(kind="kill", names=names)
    for name in names:
        starter.ask("sleep", name)
    told, alive = [], {}
    while len(alive) < 5:  # the end of an earlier one of the same name may be told after it
        event = starter.event()
        told.append(event["kind"])
        if event["kind"] == "spawned" and told.count("killed") == 3:
            alive[event["name"]] = event["pid"]
    parent = psutil.Process(starter.process.pid)
    wanted = {*alive.values()}
    until(lambda: {child.pid for child in parent.children(recursive=True)} == wanted, GONE_S)


# ---- the newborn -----------------------------------------------------------------------------


def test_a_child_has_its_own_surroundings_and_only_its_owner_reads_its_log(tmp_path: Path) -> None:
    blocked = {signal.SIGCHLD, signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:  # what a client has blocked its starter's children hear
        starter = StarterUnderTest(tmp_path / "starter", "tests.host.children")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert starter.event() == {"kind": "ready"}
    starter.spawn("tell_surroundings", RANK="5")
    told = starter.event()["log_tail"].splitlines()
    # LC_CTYPE is Python's own (PEP 538)
    assert told[0] in [f"env all 5 {count} ['--an-option']" for count in (3, 4)]
    assert told[1:] == ["session True stdin ''", "fds [0, 1, 2]", "signals set() -1", "True"]
    assert starter.log_path("rank 0").stat().st_mode & 0o077 == 0
    starter.end()


def test_a_child_holds_no_lock_of_a_gpu(starter: StarterUnderTest) -> None:
    device = f"GPU-test-{os.getpid()}"
    starter.send(kind="lock", devices=[device], number=1, force=False)
    assert starter.event()["devices"] == [device]
    pid = starter.spawn("sleep")
    starter.log("up")
    path = lock_folder() / f"gpupool-{device}.lock"
    held = [os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir()]
    assert str(path) not in held
    starter.send(kind="stop")
    assert starter.event() == {"kind": "stopped"}
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    path.unlink()


# ---- what is imported ------------------------------------------------------------------------


@pytest.mark.long
def test_it_has_one_thread_and_leaves_the_compiler_out(tmp_path: Path) -> None:
    from gpupool.pool.launchers.starter import PRELOADED

    modules = [step for step in PRELOADED if not step.startswith("=")]  # all before it is ready
    starter = StarterUnderTest(tmp_path / "starter", *modules)
    assert starter.event() == {"kind": "ready"}
    assert psutil.Process(starter.process.pid).num_threads() == 1  # others survive no fork
    starter.spawn("tell_modules")
    seen = set(starter.event()["log_tail"].split())
    assert seen >= {*modules}
    assert not seen & {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp"}
    assert not seen & {"sympy", "triton", "debugpy", "prompt_toolkit", "ipywidgets"}
    starter.end()


def test_a_target_is_forked_before_what_it_does_not_need_is_imported(tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    (tmp_path / "slow_module.py").write_text(f"print('noise', end='')\n{wait}")
    target = "tests.host.children:tell_modules"
    steps = ["tests.host.children", f"={target}", "slow_module", "=other:main"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
        starter = StarterUnderTest(tmp_path / "starter", *steps, "no_such_module", "colorsys")
    starter.ask("sleep", "rank 1")  # waits for the others' modules
    starter.spawn("tell_modules")
    seen = {*starter.log("\n").split()}
    assert not seen & {"slow_module", "colorsys"}
    go.touch()
    told = [starter.event() for _ in range(3)]
    assert {"kind": "ready"} in told
    assert "rank 1" in [event.get("name") for event in told]
    while "colorsys" not in seen:  # what is left is imported when all is quiet, if it can be
        time.sleep(1.2)
        starter.spawn("tell_modules")
        seen = {*starter.event()["log_tail"].split()}
    starter.end()
