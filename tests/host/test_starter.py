"""The real starter with small children: nothing is ever left running."""

from __future__ import annotations

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

from tests.support.processes import PATIENCE, gone, until

ROOT = Path(__file__).parents[2]
GONE_S = 3.0  # the promise: everything is gone within this time, where nothing else runs


class StarterUnderTest:
    """A starter, its children, and the line to it. Its client is `client_pid`."""

    def __init__(self, folder: Path, *needed: str, late: str = "", client_pid: int = 0) -> None:
        self.folder = folder
        self.pool_folder = folder / "pool1"
        modules = [",".join(needed or ["tests.host.children"]), late]
        arguments = [str(folder), str(client_pid or os.getpid()), "600", *modules]
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

    def ask(
        self, function: str, name: str = "rank 0", module: str = "tests.host.children", **env: str
    ) -> None:
        """Ask for a process without waiting for it."""
        target = f"{module}:{function}"
        log = str(self.log_path(name))
        self.send(kind="spawn", name=name, target=target, argv=["--an-option"], env=env, log=log)

    def spawn(self, function: str, name: str = "rank 0", **env: str) -> int:
        self.ask(function, name, **env)
        event = self.event()
        assert (event["kind"], event["name"]) == ("spawned", name)
        return int(event["pid"])

    def log_path(self, name: str) -> Path:
        return self.pool_folder / f"{name}.log"

    def log(self, text: str, name: str = "rank 0") -> str:
        path = self.log_path(name)
        until(lambda: path.exists() and text in path.read_text(), 10.0)
        return path.read_text()

    def grandchildren(self) -> list[int]:
        return [int(pid) for pid in self.log("children").split()[1:]]

    def end(self) -> None:
        with self.process:
            self.process.kill()


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[StarterUnderTest]:
    starter = StarterUnderTest(tmp_path / "starter")
    assert starter.event() == {"kind": "ready"}
    yield starter
    starter.end()


def test_client_gone_then_nothing_is_left_whatever_it_is_doing(starter: StarterUnderTest) -> None:
    pids = [starter.spawn("fork_two"), *starter.grandchildren()]
    for function in ("deaf", "hold_the_gil", "sleep"):
        pids.append(starter.spawn(function, function))
        starter.log("up", function)
    os.kill(pids[-1], signal.SIGSTOP)
    assert not any(gone(pid) for pid in pids)
    assert starter.process.stdin is not None
    starter.process.stdin.close()
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


def test_what_a_dead_child_had_forked_goes_with_it_and_all_else_at_the_stop(
    starter: StarterUnderTest,
) -> None:
    pid = starter.spawn("fork_two")
    in_its_group, in_a_session_of_its_own = starter.grandchildren()
    pids = starter.spawn("deaf", "rank 1"), starter.spawn("sleep", "rank 2")
    starter.log("up", "rank 1")
    os.kill(pid, signal.SIGKILL)
    assert starter.event()["status"] == -9
    until(lambda: gone(in_its_group), GONE_S)
    for number in range(10):
        starter.ask("sleep", f"on its way {number}")
    starter.send(kind="stop")
    while starter.event() != {"kind": "stopped"}:
        pass
    assert gone(in_a_session_of_its_own, *pids)
    assert psutil.Process(starter.process.pid).children() == []
    assert not starter.pool_folder.exists()
    starter.open()  # the next pool
    starter.spawn("sleep")


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
    parent, wanted = psutil.Process(starter.process.pid), {*alive.values()}
    until(lambda: {child.pid for child in parent.children()} == wanted, GONE_S)


def test_a_child_has_its_own_surroundings_and_only_its_owner_reads_its_log(tmp_path: Path) -> None:
    blocked = {signal.SIGCHLD, signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:  # what a client has blocked its starter's children hear
        starter = StarterUnderTest(tmp_path / "starter")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert starter.event() == {"kind": "ready"}
    starter.spawn("tell_surroundings", RANK="5")
    told = starter.event()["log_tail"].splitlines()
    # with our two, and LC_CTYPE, which is Python's own (PEP 538)
    assert told[0] in [f"env all 5 {count} ['--an-option']" for count in (5, 6)]
    # no lock of a GPU is among the descriptors
    assert told[1:] == ["session True stdin ''", "fds [0, 1, 2]", "signals set()"]
    assert starter.log_path("rank 0").stat().st_mode & 0o077 == 0
    starter.end()


@pytest.mark.long
def test_it_has_one_thread_and_leaves_the_compiler_out(tmp_path: Path) -> None:
    from gpupool.pool.launchers.starter import LATE, NEEDED

    starter = StarterUnderTest(tmp_path / "starter", *NEEDED, *LATE)  # all before it is ready
    assert starter.event() == {"kind": "ready"}
    assert psutil.Process(starter.process.pid).num_threads() == 1  # others survive no fork
    starter.spawn("tell_modules")
    seen = set(starter.event()["log_tail"].split())
    assert seen >= {*NEEDED, *LATE}
    assert not seen & {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp"}
    assert not seen & {"sympy", "triton", "debugpy", "prompt_toolkit", "ipywidgets"}
    starter.end()


def test_a_target_is_forked_before_what_it_does_not_need_is_imported(tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    (tmp_path / "slow_module.py").write_text(f"print('noise', end='')\n{wait}")
    (tmp_path / "not_needed.py").write_text("def main(): pass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
        modules = "tests.host.children", "slow_module"
        starter = StarterUnderTest(tmp_path / "starter", *modules, late="no_such_module,colorsys")
    starter.ask("main", "rank 1", module="not_needed")  # waits for all that is needed
    starter.spawn("tell_modules")
    seen = {*starter.log("\n").split()}
    assert not seen & {"slow_module", "colorsys"}
    go.touch()
    told = [starter.event() for _ in range(4)]  # both have ended, too
    assert {"kind": "ready"} in told
    assert "rank 1" in [event.get("name") for event in told]
    while "colorsys" not in seen:  # what is left is imported when all is quiet, if it can be
        time.sleep(1.2)
        starter.spawn("tell_modules")
        seen = {*starter.event()["log_tail"].split()}
    starter.end()
