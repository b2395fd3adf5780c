"""The real agent and its fork server with small children: nothing is ever left running."""

from __future__ import annotations

import contextlib
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

from gpupool.core.wire.agent import Answer, Ready
from gpupool.host.spawner import Spawner
from tests.support.processes import PATIENCE, gone, until

ROOT = Path(__file__).parents[2]
GONE_S = 3.0  # the promise: everything is gone within this time, where nothing else runs


class AgentUnderTest:
    """An agent, its children, and the line to it. Its client is `client_pid`."""

    def __init__(self, folder: Path, client_pid: int, *modules: str, warm_s: float = 600.0) -> None:
        self.folder = folder
        self.pool_folder = folder / "pool1"
        self.pool_folder.mkdir(parents=True, exist_ok=True)
        arguments = [str(folder), str(client_pid), str(warm_s), *modules]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpupool.host.agent", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
        )
        self.pids: dict[str, int] = {}

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
        env = {"PATH": os.environ["PATH"], **env}
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

    def fork_server(self) -> int:
        """Its pid; what it has forked is younger, and has its command line."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            children = psutil.Process(self.process.pid).children()
            found[:] = [c for c in children if "gpupool.host.forkserver" in " ".join(c.cmdline())]
            return bool(found)

        until(is_there, 5.0)
        return min(found, key=lambda child: child.create_time()).pid

    def end(self) -> None:
        """After a test, whatever it found."""
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
                    child.kill()
        self.process.kill()
        self.process.wait(10)
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):  # the kernel has ended it meanwhile
                if not gone(pid):
                    os.kill(pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentUnderTest]:
    agent = AgentUnderTest(tmp_path / "agent", os.getpid(), "tests.host.children")
    agent.send(kind="open", folder=str(agent.pool_folder))
    assert agent.event() == {"kind": "ready"}
    yield agent
    agent.end()


def grandchild(agent: AgentUnderTest, name: str) -> int:
    """The pid that a child has printed."""
    return int(agent.log("child", name).split()[1])


# ---- nothing is left -------------------------------------------------------------------------


def test_client_gone_then_nothing_is_left_whatever_it_is_doing(agent: AgentUnderTest) -> None:
    agent.spawn("sleep", "stopped")
    agent.spawn("deaf", "deaf")
    agent.spawn("hold_the_gil", "holding")
    agent.spawn("fork_in_its_group", "forking")
    agent.spawn("fork_in_a_session_of_its_own", "leading")
    for name in ("stopped", "deaf", "holding"):
        agent.log("up", name)
    pids = [*agent.pids.values(), agent.fork_server()]
    pids += [grandchild(agent, "forking"), grandchild(agent, "leading")]
    os.kill(agent.pids["stopped"], signal.SIGSTOP)
    assert not any(gone(pid) for pid in pids)
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    until(lambda: gone(*pids), GONE_S)
    agent.process.wait(PATIENCE * GONE_S)
    assert not agent.folder.exists()


def test_a_dead_client_is_noticed_though_a_child_it_forked_holds_the_pipe_open(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(["sleep", "60"]) as client:
        agent = AgentUnderTest(tmp_path / "agent", client.pid)  # this process holds the pipe
        agent.send(kind="open", folder=str(agent.pool_folder))
        assert agent.event() == {"kind": "ready"}
        pid = agent.spawn("sleep")
        client.kill()
        client.wait()
        until(lambda: gone(pid), GONE_S)
        agent.process.wait(PATIENCE * GONE_S)
        agent.end()


def test_a_client_that_dies_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    agent = AgentUnderTest(tmp_path / "agent", os.getpid(), "torch")
    agent.send(kind="open", folder=str(agent.pool_folder))
    for rank in range(4):
        agent.ask("sleep", f"rank {rank}")
    server = agent.fork_server()
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    agent.process.wait(PATIENCE * GONE_S)
    until(lambda: gone(server), GONE_S)
    assert not agent.folder.exists()
    agent.end()


def test_a_client_that_dies_before_the_agent_is_up_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as client:
        pass
    agent = AgentUnderTest(tmp_path / "agent", client.pid)
    agent.process.wait(PATIENCE * GONE_S)
    assert not agent.folder.exists()
    agent.end()


def test_agent_killed_then_its_children_go_too(agent: AgentUnderTest) -> None:
    first, second = agent.spawn("sleep", "rank 0"), agent.spawn("deaf", "rank 1")
    server = agent.fork_server()
    os.kill(second, signal.SIGSTOP)
    agent.process.kill()
    until(lambda: gone(first, second, server), GONE_S)


def test_a_pool_whose_folder_is_gone_still_ends(agent: AgentUnderTest) -> None:
    pid = agent.spawn("sleep")
    agent.log("up")
    for path in agent.pool_folder.iterdir():
        path.unlink()
    agent.pool_folder.rmdir()
    agent.send(kind="stop")
    assert agent.event() == {"kind": "stopped"}
    assert gone(pid)


@pytest.mark.long
def test_an_agent_that_nobody_uses_goes_away_by_itself(tmp_path: Path) -> None:
    agent = AgentUnderTest(tmp_path / "agent", os.getpid(), warm_s=2.0)
    agent.send(kind="open", folder=str(agent.pool_folder))
    assert agent.event() == {"kind": "ready"}
    server = agent.fork_server()
    time.sleep(3.0)
    assert agent.process.poll() is None  # while a pool is open it stays
    agent.send(kind="stop")
    assert agent.event() == {"kind": "stopped"}
    agent.process.wait(PATIENCE * GONE_S)
    until(lambda: gone(server), GONE_S)
    assert not agent.folder.exists()
    agent.end()


# ---- ends are told ---------------------------------------------------------------------------


def test_an_end_is_told_with_its_status_and_the_end_of_the_log(agent: AgentUnderTest) -> None:
    agent.spawn("end_with_three")
    event = agent.event()
    assert (event["kind"], event["name"], event["status"]) == ("exited", "rank 0", 3)
    lines = event["log_tail"].splitlines()
    assert (len(lines), lines[-1]) == (20, "line 99")


def test_an_error_is_in_the_log_as_always(agent: AgentUnderTest) -> None:
    agent.spawn("raise_an_error")
    event = agent.event()
    assert (event["status"], event["cause"]) == (1, "")
    assert event["log_tail"].endswith("RuntimeError: what went wrong")


def test_a_death_by_signal_is_told_at_once(agent: AgentUnderTest) -> None:
    pid = agent.spawn("sleep")
    agent.log("up")
    os.kill(pid, signal.SIGKILL)
    event = agent.event()
    assert event.pop("log_tail") == "up"
    assert event == {"kind": "exited", "name": "rank 0", "status": -9, "cause": ""}


def test_of_a_crash_the_innermost_frames_are_told(agent: AgentUnderTest) -> None:
    agent.spawn("crash")
    event = agent.event()
    assert event["status"] == -signal.SIGSEGV
    assert event["log_tail"].startswith("Fatal Python error: Segmentation fault")
    assert "in string_at" in event["log_tail"]


def test_an_end_is_not_told_with_the_log_of_an_earlier_process(agent: AgentUnderTest) -> None:
    agent.spawn("print_and_crash_or_sleep", LIFE="1")
    assert "Segmentation fault" in agent.event()["log_tail"]
    pid = agent.spawn("print_and_crash_or_sleep", LIFE="2")
    agent.log("life 2\nup")
    os.kill(pid, signal.SIGKILL)
    assert agent.event()["log_tail"].splitlines() == ["life 2", "up"]
    assert "life 1" in agent.log_path("rank 0").read_text()  # it can still be looked up


def test_of_a_huge_log_only_the_end_is_read(agent: AgentUnderTest) -> None:
    agent.spawn("write_one_long_line")
    event = agent.event()
    assert event["log_tail"].endswith("the end")
    assert len(event["log_tail"]) <= 1 << 16
    memory = psutil.Process(agent.process.pid).memory_info().rss
    assert memory < 200 << 20


def test_what_a_dead_child_had_forked_goes_with_it(agent: AgentUnderTest) -> None:
    pid = agent.spawn("fork_in_its_group")
    child = grandchild(agent, "rank 0")
    os.kill(pid, signal.SIGKILL)
    assert agent.event()["status"] == -9
    until(lambda: gone(child), GONE_S)


@pytest.mark.long
def test_a_log_is_kept_short_and_goes_on(agent: AgentUnderTest) -> None:
    pid, path = agent.spawn("flood"), agent.log_path("rank 0")
    until(lambda: path.exists() and 0 < path.stat().st_size < 2 << 20, 10.0)
    assert agent.log("the end").startswith("(the beginning was too long)\nxxx")
    os.kill(pid, signal.SIGKILL)
    assert agent.event()["log_tail"].endswith("the end")


def test_files_of_a_pool_in_use_do_not_become_old(agent: AgentUnderTest) -> None:
    """Cleaners of /tmp that heed no locks remove what was not used for hours."""
    old = [agent.folder / "old", agent.pool_folder / "older"]
    for path in old:
        path.touch()
        os.utime(path, (0, 0))
    server = agent.fork_server()
    agent.process.kill()
    agent.process.wait()
    until(lambda: gone(server), GONE_S)
    again = AgentUnderTest(agent.folder, os.getpid())
    again.send(kind="open", folder=str(agent.pool_folder))
    until(lambda: all(path.stat().st_mtime > time.time() - 600 for path in old), GONE_S)
    again.end()


def test_what_a_client_has_blocked_its_agent_and_their_children_hear(tmp_path: Path) -> None:
    blocked = {signal.SIGCHLD, signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        agent = AgentUnderTest(tmp_path / "agent", os.getpid())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    agent.send(kind="open", folder=str(agent.pool_folder))
    assert agent.event() == {"kind": "ready"}
    agent.spawn("wait_for_interrupt")
    agent.log("up")
    agent.send(kind="signal", name="rank 0", number=int(signal.SIGINT))
    agent.log("interrupted")
    assert agent.event()["kind"] == "exited"
    agent.end()


MEMORY = Path("/sys/fs/cgroup/memory")


def test_a_child_killed_for_lack_of_memory_is_told_as_such(tmp_path: Path) -> None:
    group = MEMORY / f"gpupool-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs a memory cgroup (v1) of its own: {error}")
    (group / "memory.limit_in_bytes").write_text(str(200 << 20))
    agent = AgentUnderTest(tmp_path / "agent", os.getpid())
    try:
        (group / "cgroup.procs").write_text(str(agent.process.pid))
        # Its fork server may have been started outside: another one is started inside.
        os.kill(agent.fork_server(), signal.SIGKILL)
        while agent.event()["kind"] != "exited":
            pass
        agent.send(kind="open", folder=str(agent.pool_folder))
        assert agent.event() == {"kind": "ready"}
        agent.spawn("eat_memory")
        event = agent.event()
        assert (event["name"], event["status"]) == ("rank 0", -9)
        assert event["cause"] == (
            "out of host memory: the memory limit of its cgroup (0.2 GiB) was reached"
        )
    finally:
        agent.end()
        until(lambda: not (group / "cgroup.procs").read_text(), 5.0)
        group.rmdir()


# ---- stop ------------------------------------------------------------------------------------


def test_stop_ends_what_hears_and_kills_what_does_not(agent: AgentUnderTest) -> None:
    for number in range(20):  # on a machine with much to do it may not come to say that in 0.4 s
        deaf, hearing = agent.spawn("deaf"), agent.spawn("sleep", "rank 1")
        agent.log("up")
        agent.log("up", "rank 1")
        copy = agent.folder.parent / f"log{number}"
        os.link(agent.log_path("rank 0"), copy)  # the pool's folder goes with it
        agent.send(kind="stop")
        assert agent.event() == {"kind": "stopped"}
        assert gone(deaf, hearing)
        assert not agent.pool_folder.exists()
        if "told" in copy.read_text():
            break
        agent.pool_folder.mkdir()
        agent.send(kind="open", folder=str(agent.pool_folder))
        assert agent.event() == {"kind": "ready"}
    assert "told" in copy.read_text()  # it was asked first


def test_stop_ends_what_a_child_started_in_a_session_of_its_own(agent: AgentUnderTest) -> None:
    agent.spawn("fork_in_a_session_of_its_own")
    child = grandchild(agent, "rank 0")
    agent.send(kind="stop")
    assert agent.event() == {"kind": "stopped"}
    assert gone(child)


def test_after_a_stop_the_agent_is_warm_for_the_next_pool(agent: AgentUnderTest) -> None:
    server = agent.fork_server()
    first = agent.spawn("sleep")
    agent.send(kind="stop")
    assert agent.event() == {"kind": "stopped"}
    agent.pool_folder = agent.folder / "pool2"
    agent.pool_folder.mkdir()
    agent.send(kind="open", folder=str(agent.pool_folder))
    assert agent.event() == {"kind": "ready"}
    second = agent.spawn("sleep")
    assert agent.fork_server() == server
    assert gone(first)
    assert not gone(second)


def test_a_stop_while_processes_are_on_their_way_leaves_none(agent: AgentUnderTest) -> None:
    for number in range(20):
        agent.ask("sleep", f"rank {number}")
    agent.send(kind="stop")
    told = [agent.event()]
    while told[-1]["kind"] != "stopped":
        told.append(agent.event())
    server = psutil.Process(agent.fork_server())
    parent = psutil.Process(agent.process.pid)
    until(lambda: parent.children(recursive=True) == [server], GONE_S)


def test_a_kill_also_ends_what_is_on_its_way_and_the_name_is_free_again(
    agent: AgentUnderTest,
) -> None:
    names = [f"rank {number}" for number in range(5)]
    for _ in range(3):
        for name in names:
            agent.ask("sleep", name)
        agent.send(kind="kill", names=names)
    for name in names:
        agent.ask("sleep", name)
    told, alive = [], {}
    while len(alive) < 5:  # the end of an earlier one of the same name may be told after it
        event = agent.event()
        told.append(event["kind"])
        if event["kind"] == "spawned" and told.count("killed") == 3:
            alive[event["name"]] = event["pid"]
    server = agent.fork_server()
    parent = psutil.Process(agent.process.pid)
    wanted = {server, *alive.values()}
    until(lambda: {child.pid for child in parent.children(recursive=True)} == wanted, GONE_S)


# ---- the fork server -------------------------------------------------------------------------


def test_what_a_fork_server_said_before_it_ended_may_be_read_after_that(tmp_path: Path) -> None:
    """Its end and that of a rank, a moment earlier, are one signal to the agent."""
    spawner = Spawner(tmp_path, [])
    lines = spawner.start()
    said: list[Answer] = []
    while not said:
        said = lines.read()
    assert spawner.pid is not None
    os.kill(spawner.pid, signal.SIGKILL)
    os.waitpid(spawner.pid, 0)
    spawner.lost(-signal.SIGKILL)
    assert said == [Ready()]
    assert not spawner.hear(said[0])
    assert not spawner.ready  # the next one is another
    lines.close()


def test_a_killed_fork_server_is_told_and_started_again(agent: AgentUnderTest) -> None:
    survivor = agent.spawn("sleep", "rank 0")
    before = agent.fork_server()
    os.kill(before, signal.SIGKILL)
    event = agent.event()
    assert (event["kind"], event["name"], event["status"]) == ("exited", "fork server", -9)
    agent.ask("sleep", "rank 1")
    assert agent.event() == {"kind": "ready"}
    assert agent.event()["kind"] == "spawned"
    assert agent.fork_server() != before
    assert not gone(survivor)


def num_pipes(pid: int) -> int:
    """Pipes that a process has open; files come and go while it reads and writes some."""
    folder, number = Path(f"/proc/{pid}/fd"), 0
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            number += os.readlink(folder / name).startswith("pipe:")
    return number


def test_a_fork_server_that_cannot_be_started_costs_the_others_nothing(
    agent: AgentUnderTest,
) -> None:
    survivor = agent.spawn("sleep", "rank 0")
    process = psutil.Process(agent.process.pid)
    before = num_pipes(process.pid)
    os.kill(agent.fork_server(), signal.SIGKILL)
    assert agent.event()["name"] == "fork server"
    until(lambda: num_pipes(process.pid) == before - 2, 5.0)  # those to the server are closed
    agent.send(kind="kill", names=[])
    assert agent.event() == {"kind": "killed"}  # it has done all else: it has no file open
    limits = process.rlimit(psutil.RLIMIT_NOFILE)
    taken = sorted(map(int, os.listdir(f"/proc/{process.pid}/fd")))
    free = [number for number in range(1000) if number not in taken]
    process.rlimit(psutil.RLIMIT_NOFILE, (free[1] + 1, limits[1]))  # room for two files
    agent.ask("sleep", "rank 1")
    event = agent.event()
    assert (event["kind"], event["name"]) == ("exited", "fork server")
    assert "Too many open files" in event["cause"]
    process.rlimit(psutil.RLIMIT_NOFILE, limits)
    agent.ask("sleep", "rank 1")
    assert agent.event() == {"kind": "ready"}
    assert agent.event()["kind"] == "spawned"
    assert not gone(survivor)


@pytest.mark.parametrize("room", [1, 2], ids=["at-once", "in-the-go-between"])
def test_a_fork_that_fails_is_told_with_the_reason(agent: AgentUnderTest, room: int) -> None:
    group = Path("/sys/fs/cgroup/pids") / f"gpupool-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs a pids cgroup (v1) of its own: {error}")
    try:
        (group / "pids.max").write_text(str(room))
        (group / "cgroup.procs").write_text(str(agent.fork_server()))
        agent.ask("sleep")
        event = agent.event()
        assert (event["kind"], event["name"], event["status"]) == ("exited", "fork server", 1)
        assert "Resource temporarily unavailable" in event["log_tail"]
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), 5.0)
        group.rmdir()


def test_a_module_that_cannot_be_imported_is_told_with_the_reason(tmp_path: Path) -> None:
    agent = AgentUnderTest(tmp_path / "agent", os.getpid(), "no_such_module")
    event = agent.event()
    assert (event["kind"], event["name"], event["status"]) == ("exited", "fork server", 1)
    assert "No module named 'no_such_module'" in event["log_tail"]
    agent.end()


@pytest.mark.long
def test_the_fork_server_has_one_thread_and_leaves_the_compiler_out(tmp_path: Path) -> None:
    from gpupool.pool.processes.agent import PRELOADED

    modules = [step for step in PRELOADED if not step.startswith("=")]  # all before it is ready
    agent = AgentUnderTest(tmp_path / "agent", os.getpid(), *modules)
    assert agent.event() == {"kind": "ready"}
    assert psutil.Process(agent.fork_server()).num_threads() == 1  # others do not survive a fork
    agent.spawn("tell_modules")
    seen = set(agent.event()["log_tail"].split())
    assert seen >= {*modules}
    assert not seen & {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp"}
    assert not seen & {"sympy", "triton", "debugpy", "prompt_toolkit", "ipywidgets"}
    agent.end()


def test_a_target_is_forked_before_what_it_does_not_need_is_imported(tmp_path: Path) -> None:
    slow = tmp_path / "slow_module.py"
    go = tmp_path / "go"
    slow.write_text(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)")
    target = "tests.host.children:tell_modules"
    steps = ["tests.host.children", f"={target}", "slow_module", "=other:main", "colorsys"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
        agent = AgentUnderTest(tmp_path / "agent", os.getpid(), *steps)
    agent.ask("sleep", "rank 1")  # waits for the others' modules
    agent.spawn("tell_modules")
    seen = {*agent.event()["log_tail"].split()}
    assert not seen & {"slow_module", "colorsys"}
    go.touch()
    assert agent.event() == {"kind": "ready"}
    assert agent.event()["name"] == "rank 1"
    while "colorsys" not in seen:  # what is left is imported when all is quiet
        time.sleep(1.2)
        agent.spawn("tell_modules")
        seen = {*agent.event()["log_tail"].split()}
    agent.end()


def test_a_child_has_its_own_surroundings_and_only_its_owner_reads_its_log(
    agent: AgentUnderTest,
) -> None:
    agent.spawn("tell_surroundings", RANK="5")
    assert agent.event()["log_tail"].splitlines() == [
        "rank 5 path True ['--an-option']",
        "session True stdin ''",
        "fds [0, 1, 2]",
    ]
    assert agent.log_path("rank 0").stat().st_mode & 0o077 == 0


def test_a_child_does_not_read_what_was_meant_for_its_siblings(agent: AgentUnderTest) -> None:
    for number in range(8):
        agent.ask("tell_surroundings", f"rank {number}")
    tails = [event["log_tail"] for event in [agent.event() for _ in range(16)] if "cause" in event]
    assert len(tails) == 8
    assert all("session True stdin ''" in tail for tail in tails)


def test_the_end_of_a_child_that_has_said_nothing_yet_is_told(agent: AgentUnderTest) -> None:
    """It is killed as soon as the kernel has handed it to the agent, mostly before it is up."""
    pid = agent.process.pid
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    before = listed.read_text().split()
    for _ in range(10):
        agent.ask("sleep")
        while not (new := {*listed.read_text().split()} - {*before}):
            pass
        os.kill(int(*new), signal.SIGKILL)
        told = [agent.event(), agent.event()]
        assert [one["kind"] for one in told] == ["spawned", "exited"]
        assert (told[0]["pid"], told[1]["status"]) == (int(*new), -signal.SIGKILL)


def test_a_signal_reaches_the_child_it_is_meant_for(agent: AgentUnderTest) -> None:
    agent.spawn("wait_for_interrupt", "rank 0")
    other = agent.spawn("sleep", "rank 1")
    agent.log("up")
    agent.send(kind="signal", name="rank 7", number=signal.SIGINT)  # not there: nothing happens
    agent.send(kind="signal", name="rank 0", number=signal.SIGINT)
    event = agent.event()
    assert (event["name"], event["status"], event["log_tail"]) == ("rank 0", 0, "up\ninterrupted")
    assert not gone(other)


def test_an_interrupt_at_the_terminal_is_the_clients_affair(agent: AgentUnderTest) -> None:
    agent.spawn("sleep")
    agent.process.send_signal(signal.SIGINT)
    agent.spawn("sleep", "rank 1")  # it still serves
