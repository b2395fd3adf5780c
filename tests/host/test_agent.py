"""A starter as the agent of another host, whose line is a pipe here."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupool.core.errors import PoolError
from gpupool.core.machine.topology import divide, joined, place
from gpupool.core.wire.starter import CONNECTION_FILE
from gpupool.pool.launchers.hosts import Agent
from tests.support.processes import gone, until
from tests.support.raising import raises

_IMPATIENT = "from gpupool.host import starter; starter._SILENCE_S = {}; starter.main()"
_NOISE = "print('Welcome to this cluster', end=''); "


class Agents:
    """Makes agents, and notes the ends that they report."""

    def __init__(self) -> None:
        self.ended: dict[str, str] = {}
        self._made: list[Agent] = []

    def make(self, silence_s: float = 30.0, python: str = sys.executable) -> Agent:
        code = _NOISE + _IMPATIENT.format(silence_s)
        command = [python, "-c", code, "", "0", "600", "tests.host.children", ""]
        self.ready = threading.Event()
        agent = Agent("gpu1", command, self._note, self.ready.set)
        self._made.append(agent)
        return agent

    def _note(self, name: str, how: str, log_tail: str) -> None:
        self.ended[name] = how

    def end(self) -> None:
        for agent in self._made:
            agent.stop()


@pytest.fixture
def agents() -> Iterator[Agents]:
    agents = Agents()
    yield agents
    agents.end()


def start_rank(agent: Agent) -> int:
    agent.ranks.add(1)
    agent._spawn("rank 1", "tests.host.children:sleep", [], {}, {})
    until(lambda: "rank 1" in agent.pids, 10.0)
    return agent.pids["rank 1"]


def test_it_says_what_its_host_is_and_serves_a_pool_there(agents: Agents) -> None:
    agent = agents.make()
    hello = agent.hello(20.0)
    assert hello.versions["python"] == ".".join(map(str, sys.version_info[:2]))
    assert hello.num_cores >= 1
    address, port = hello.listens_at[0][1:]
    assert agent.reach({"here": [(address, port)], "nobody": [("127.0.0.1", 1)]}).failed.keys() == {
        "nobody"
    }
    agent.open({"OF_NOTEBOOK": "x"}, "the keys", "")
    file = Path(agent.folder, CONNECTION_FILE)
    assert file.read_text() == "the keys"
    assert file.stat().st_mode & 0o077 == 0
    pid = start_rank(agent)
    until(lambda: "up" in (agent.log("rank 1") or ""), 10.0)
    agent.look()
    until(lambda: agent._num_unheard == 0, 10.0)
    agent.stop()
    assert gone(pid)
    assert not Path(agent.folder).parent.exists()


def test_a_host_that_is_not_heard_is_lost_with_its_ranks(agents: Agents) -> None:
    agent = agents.make()
    agent.hello(20.0)
    agent.open({}, "the keys", "")
    pid = start_rank(agent)
    os.kill(agent.line._process.pid, signal.SIGSTOP)
    for _ in range(6):
        agent.look()
    until(lambda: "rank 1" in agents.ended, 10.0)
    assert "gpu1" in agents.ended["rank 1"]
    assert agent.is_lost
    until(lambda: gone(pid), 10.0)


def test_without_its_notebook_it_ends_and_leaves_nothing(agents: Agents) -> None:
    agent = agents.make(silence_s=0.5)
    agent.hello(20.0)
    agent.open({}, "the keys", "")
    pid = start_rank(agent)
    until(lambda: gone(pid) and not Path(agent.folder).parent.exists(), 10.0)
    until(lambda: "heard" in agents.ended.get("rank 1", ""), 10.0)


def test_one_that_cannot_start_says_why(agents: Agents) -> None:
    code = "import sys; sys.exit('connect to host gpu1 port 22: No route to host')"
    agent = Agent("gpu1", [sys.executable, "-c", code], lambda *_: None, lambda: None)
    with raises(PoolError, "gpu1", "No route to host"):
        agent.hello(20.0)
    agent.stop()


def test_keys_are_not_sent_where_the_network_can_read_them(agents: Agents, tmp_path: Path) -> None:
    agent = agents.make()
    with raises(PoolError, "gpu1", "missing"):
        agent.open({}, "", str(tmp_path / "missing"))
    file = tmp_path / "shared"
    file.write_text("the keys")
    agent.open({}, "", str(file))
    assert Path(agent.folder, CONNECTION_FILE).read_text() == "the keys"


def test_ranks_are_numbered_host_by_host() -> None:
    ranks = joined([place((), 2, 4), place((), 1, 4)])
    assert [(one.rank, one.node_rank, one.local_rank) for one in ranks] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
    ]
    assert {(one.world_size, one.num_nodes) for one in ranks} == {(3, 2)}
    assert [one.local_world_size for one in ranks] == [2, 2, 1]
    assert divide(5, 3) == [2, 2, 1]
