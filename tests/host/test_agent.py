"""The real agent with small children: whatever happens, nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pool.processes import gone, until

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
GONE_S = 3.0  # the promise: everything is gone within this time


class AgentUnderTest:
    """An agent, its children, and the line to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpupool.host.agent", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pids: list[int] = []

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")

    def event(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def spawn(self, argv: list[str], name: str = "rank 0", **env: str) -> int:
        log = self.folder / f"{name}.log"
        self.send(op="spawn", name=name, argv=argv, env=env, log=str(log))
        event = self.event()
        assert (event["event"], event["name"]) == ("spawned", name)
        self.pids.append(event["pid"])
        return int(event["pid"])

    def log(self, text: str, name: str = "rank 0") -> None:
        """Wait until a child has printed something."""
        path = self.folder / f"{name}.log"
        until(lambda: path.exists() and text in path.read_text(), 10.0)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentUnderTest]:
    folder = tmp_path / "pool"
    folder.mkdir()
    agent = AgentUnderTest(folder)
    yield agent
    for pid in agent.pids:
        if not gone(pid):
            os.killpg(pid, signal.SIGKILL)
    agent.process.kill()
    agent.process.wait(10)
    assert agent.process.stdin is not None
    assert agent.process.stdout is not None
    agent.process.stdin.close()
    agent.process.stdout.close()


def forking_shell(agent: AgentUnderTest, name: str) -> tuple[int, int]:
    """A shell that has started a child of its own; the pids of both."""
    pid = agent.spawn(["sh", "-c", "sleep 60 & echo child $!; wait"], name)
    agent.log("child", name)
    text = (agent.folder / f"{name}.log").read_text()
    return pid, int(text.split()[1])


def test_client_gone_then_nothing_is_left_not_even_the_stopped_and_the_grandchildren(
    agent: AgentUnderTest,
) -> None:
    plain = agent.spawn(SLEEP, "controller")
    stopped = agent.spawn(SLEEP, "rank 0")
    deaf = agent.spawn(["sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"], "rank 1")
    shell, grandchild = forking_shell(agent, "rank 2")
    os.kill(stopped, signal.SIGSTOP)
    pids = plain, stopped, deaf, shell, grandchild
    assert not any(gone(pid) for pid in pids)
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    until(lambda: gone(*pids), GONE_S)
    agent.process.wait(GONE_S)
    assert not agent.folder.exists()


def test_agent_killed_then_its_children_go_too(agent: AgentUnderTest) -> None:
    first, second = agent.spawn(SLEEP, "rank 0"), agent.spawn(SLEEP, "rank 1")
    os.kill(second, signal.SIGSTOP)
    agent.process.kill()
    until(lambda: gone(first, second), GONE_S)


def test_an_end_is_told_with_its_status_and_the_end_of_the_log(agent: AgentUnderTest) -> None:
    code = "import sys; [print('line', i) for i in range(100)]; sys.exit(3)"
    agent.spawn([sys.executable, "-c", code])
    event = agent.event()
    assert (event["event"], event["name"], event["status"]) == ("exited", "rank 0", 3)
    lines = event["log_tail"].splitlines()
    assert (len(lines), lines[-1]) == (20, "line 99")


def test_a_death_by_signal_is_told_at_once(agent: AgentUnderTest) -> None:
    pid = agent.spawn(SLEEP)
    os.kill(pid, signal.SIGKILL)
    assert agent.event() == {"event": "exited", "name": "rank 0", "status": -9, "log_tail": ""}


def test_of_a_crash_the_innermost_frames_are_told(agent: AgentUnderTest) -> None:
    code = (
        "import ctypes, faulthandler; faulthandler.enable()\n"
        "def dive(n):\n    dive(n - 1) if n else ctypes.string_at(0)\ndive(40)"
    )
    agent.spawn([sys.executable, "-c", code])
    event = agent.event()
    assert event["status"] == -signal.SIGSEGV
    assert event["log_tail"].startswith("Fatal Python error: Segmentation fault")
    assert "in string_at" in event["log_tail"]


def test_what_a_dead_child_had_forked_goes_with_it(agent: AgentUnderTest) -> None:
    shell, grandchild = forking_shell(agent, "rank 0")
    os.kill(shell, signal.SIGKILL)
    assert agent.event()["status"] == -9
    until(lambda: gone(grandchild), GONE_S)


def test_stop_ends_what_hears_and_kills_what_does_not(agent: AgentUnderTest) -> None:
    told = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: print('told'))\n"
    deaf = agent.spawn([sys.executable, "-uc", f"{told}print('up')\nwhile 1: time.sleep(1)"])
    hearing = agent.spawn(SLEEP, "rank 1")
    agent.log("up")
    copy = agent.folder.parent / "log"
    os.link(agent.folder / "rank 0.log", copy)  # the folder goes with the agent
    agent.send(op="stop")
    assert agent.event() == {"event": "stopped"}
    assert gone(deaf, hearing)
    assert "told" in copy.read_text()  # it was asked first
    agent.process.wait(GONE_S)
    assert not agent.folder.exists()


def test_a_signal_reaches_the_child_it_is_meant_for(agent: AgentUnderTest) -> None:
    code = "import time\nprint('up')\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('int')"
    agent.spawn([sys.executable, "-uc", code], "rank 0")
    other = agent.spawn(SLEEP, "rank 1")
    agent.log("up")
    agent.send(op="signal", name="rank 7", signal=signal.SIGINT)  # not there: nothing happens
    agent.send(op="signal", name="rank 0", signal=signal.SIGINT)
    event = agent.event()
    assert (event["name"], event["status"], event["log_tail"]) == ("rank 0", 0, "up\nint")
    assert not gone(other)


def test_a_child_gets_its_variables_and_only_its_owner_reads_its_log(
    agent: AgentUnderTest,
) -> None:
    agent.spawn(["sh", "-c", "echo rank=$GPUPOOL_TEST"], GPUPOOL_TEST="5")
    assert agent.event()["log_tail"] == "rank=5"
    assert (agent.folder / "rank 0.log").stat().st_mode & 0o077 == 0


def test_an_interrupt_at_the_terminal_is_the_clients_affair(agent: AgentUnderTest) -> None:
    agent.spawn(SLEEP)
    agent.process.send_signal(signal.SIGINT)
    agent.spawn(SLEEP, "rank 1")  # it still serves
