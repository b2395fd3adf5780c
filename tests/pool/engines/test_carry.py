"""Values for ranks on another host, and results from there.

Here these ranks run on this machine, with a folder of their own: what a call brings is copied.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpupool import Pool, PoolOptions, SpmdError
from gpupool.core.wire import environ
from gpupool.notebook.cells.views import QuietView
from gpupool.pool.engines import engines
from gpupool.pool.engines.carry import PIECE_BYTES
from gpupool.pool.engines.client import unheard_output
from gpupool.pool.launchers.processes import Forked
from gpupool.spmd.cell import Notebook, SpmdRun
from tests.support.environment import environment, plain_environment
from tests.support.processes import engine_pid, until

AWAY = "rank 0", "rank 1"  # and rank 2 is on the notebook's host
NUM = PIECE_BYTES // 8 + 1000  # float64 numbers, in two pieces


class TwoHosts:
    """A pool whose first ranks are away, and a notebook that has `names`."""

    def __init__(self, folder: Path) -> None:
        class Hosts(Forked):
            def _spawn(self, name: str, target: str, argv: Any, env: Any, defaults: Any) -> None:
                own = {environ.POOL_FOLDER: str(folder)} if name in AWAY else {}
                super()._spawn(name, target, argv, env | own, defaults)

        self.folder = folder
        self.names: dict[str, Any] = {}
        with pytest.MonkeyPatch.context() as patch, environment(plain_environment()):
            patch.setattr(engines, "Forked", Hosts)
            self.pool = Pool(PoolOptions(n=3, device="cpu"))
        for rank in range(len(AWAY)):
            engine = self.pool.engines._engines[rank]
            engine.place = replace(engine.place, host="other")

    def cell(self, source: str) -> list[Any]:
        at = Notebook(self.names, str)
        run = SpmdRun(self.pool, source, (0, 1, 2), QuietView(), notebook=at)
        return list(dict(run.result()).values())

    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    hosts = TwoHosts(tmp_path_factory.mktemp("other"))
    yield hosts
    hosts.pool.stop()


def test_a_value_is_copied_once_and_the_copy_goes_when_the_notebook_has_released_it(
    hosts: TwoHosts,
) -> None:
    hosts.names["x"] = np.arange(NUM, dtype=float)
    before = hosts.files()
    assert hosts.cell("x.sum().item()") == [NUM * (NUM - 1) / 2] * 3
    first = hosts.files() - before
    assert len(first) == 1
    maps = [Path(f"/proc/{engine_pid(hosts.pool, rank)}/maps").read_text() for rank in range(3)]
    assert [str(hosts.folder) in text for text in maps] == [True, True, False]
    found = hosts.files()
    hosts.names["y"] = 1
    assert hosts.cell("x[-1].item() + y") == [float(NUM)] * 3
    assert hosts.files() == found
    hosts.names["x"] = np.ones(NUM)
    assert hosts.cell("x.sum().item()") == [NUM] * 3
    until(lambda: len(hosts.files()) == len(found), 2.0, "the removal of the first copy")
    assert not hosts.files() & first


def test_values_of_ranks_come_back_and_leave_nothing(hosts: TwoHosts) -> None:
    hosts.cell(f"import numpy as np\nz = np.full({NUM}, float(rank)); small = rank")
    before = hosts.files()
    for rank in range(3):
        found = hosts.names["z"][rank]
        assert (found.shape, found.min(), found.max()) == ((NUM,), rank, rank)
        assert hosts.names["small"][rank] == rank
    until(lambda: hosts.files() == before, 2.0, "the removal of what was fetched")


def test_what_functions_are_given_and_state_reach_all_hosts(hosts: TwoHosts) -> None:
    constant = hosts.pool.put(np.full(NUM, 2.0))
    total = hosts.pool.run(lambda a, b: float((a + b).sum()), constant, np.ones(NUM))
    assert dict(total) == dict.fromkeys(range(3), 3.0 * NUM)
    hosts.pool.run("import torch\nw = torch.full((300_000,), float(rank))")
    hosts.pool.sync_from(0, "w")
    assert dict(hosts.pool.run("w.mean().item()")) == dict.fromkeys(range(3), 0.0)


@pytest.mark.parametrize("ename", ["KeyboardInterrupt", "EngineDiedError"])
def test_a_sending_ends_with_its_call_or_its_rank(hosts: TwoHosts, ename: str) -> None:
    before, pid = hosts.files(), engine_pid(hosts.pool, 0)
    os.kill(pid, signal.SIGSTOP)
    execution = hosts.pool.begin(np.sum, np.ones(NUM), ranks=(0, 1), on_output=unheard_output)
    asked = hosts.pool.engines._engines[0].requests
    until(lambda: bool(asked), 5.0, "the sending")
    if ename == "EngineDiedError":  # and the next rank takes the value
        os.kill(pid, signal.SIGKILL)
        ended = {0}
    else:
        execution.interrupt()
        until(lambda: 0 in execution._failures, 5.0, "the end of the sending")
        os.kill(pid, signal.SIGCONT)
        ended = {0, 1}
    with pytest.raises(SpmdError) as caught:
        execution.result()
    errors = {rank: one.ename for rank, one in caught.value.errors.items()}
    assert errors == dict.fromkeys(ended, ename)
    hosts.names["w"] = np.full(NUM, 3.0)
    assert hosts.cell("w.sum().item()") == [3.0 * NUM] * 3
    until(lambda: len(hosts.files() - before) == 1, 5.0, "the removal of what was sent")
