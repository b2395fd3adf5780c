"""Values for ranks on another host, and results from there.

Here these ranks run on this machine, with a folder of their own: what a call brings is copied.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpupool import Pool, PoolOptions, SpmdError, predict
from gpupool.core.wire import environ
from gpupool.core.wire.calls import Call, Receive, RunFunction, RunSource, SyncState, Train
from gpupool.core.wire.pickles import Part
from gpupool.core.wire.values import Bindings, Job, Place, Values
from gpupool.notebook.cells.views import QuietView
from gpupool.pool.engines import engines
from gpupool.pool.engines.carry import PIECE_BYTES, with_paths
from gpupool.pool.engines.iopub import unheard_output
from gpupool.pool.launchers.forked import Forked
from gpupool.spmd.cell import Notebook, SpmdRun
from tests.support.environment import environment, plain_environment
from tests.support.processes import engine_pid, until
from tests.support.trainings import network, samples, train_on, weights

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
        """The values of a cell."""
        at = Notebook(self.names, str)
        run = SpmdRun(self.pool, source, (0, 1, 2), QuietView("everything"), notebook=at)
        return list(dict(run.result()).values())

    def files(self) -> dict[str, int]:
        """What is in the folder of the ranks that are away: name -> inode."""
        return {path.name: path.stat().st_ino for path in self.folder.iterdir()}

    @contextmanager
    def stopped(self) -> Iterator[int]:
        """Rank 0, which answers nothing meanwhile: its pid."""
        pid = engine_pid(self.pool, 0)
        os.kill(pid, signal.SIGSTOP)
        yield pid
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def is_sending(self) -> bool:
        """Whether rank 0 was asked for something that it has not answered."""
        return bool(self.pool.engines._engines[0].requests)


@pytest.fixture(scope="module")
def _hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    hosts = TwoHosts(tmp_path_factory.mktemp("other"))
    yield hosts
    hosts.pool.stop()


@pytest.fixture
def hosts(_hosts: TwoHosts) -> TwoHosts:
    """The same for all tests, without names."""
    _hosts.names.clear()
    gc.collect()
    return _hosts


HERE, INLINE = Part(5, False, path="/here", start=64), Part(1, True, b"x")
VALUES = Values([(1, [INLINE, HERE]), (2, [INLINE])], {"x": 1}, {}, [1], Place([], "", 0), {})


@pytest.mark.parametrize(
    "call",
    [
        Receive(VALUES),
        RunSource("x", 1, bindings=Bindings(VALUES, [], [], ["y"]), number=7),
        RunFunction([HERE, INLINE], {"f": (1, "text")}),
        SyncState((HERE,)),
        Train(Job("a", [HERE], ["/place"], {}), "weights"),
    ],
)
def test_parts_in_files_are_replaced_wherever_they_are(call: Call[Any]) -> None:
    moved = with_paths(call, {"/here": "/there"}.__getitem__)
    assert (type(moved), moved.number) == (type(call), call.number)
    assert repr(moved) == repr(call).replace("/here", "/there") != repr(call)


def test_a_value_is_copied_once_and_the_copy_goes_when_the_notebook_has_released_it(
    hosts: TwoHosts,
) -> None:
    hosts.names["x"] = np.arange(NUM, dtype=float)
    before = hosts.files()
    assert hosts.cell("x.sum().item()") == [NUM * (NUM - 1) / 2] * 3
    first = hosts.files().keys() - before.keys()
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
    assert not hosts.files().keys() & first


def test_a_constant_and_what_a_function_is_given(hosts: TwoHosts) -> None:
    constant = hosts.pool.put(np.full(NUM, 2.0))
    hosts.names["c"] = constant
    assert hosts.cell("c.sum().item()") == [2.0 * NUM] * 3
    total = hosts.pool.run(lambda a, b: float((a + b).sum()), constant, np.ones(NUM))
    assert dict(total) == dict.fromkeys(range(3), 3.0 * NUM)
    assert hosts.pool.run(len, b"x" * 2**20, ranks=[1])[1] == 2**20


def test_values_of_ranks_come_back_and_leave_nothing(hosts: TwoHosts) -> None:
    hosts.cell(f"import numpy as np\nz = np.full({NUM}, float(rank)); small = rank")
    before = hosts.files()
    for rank in range(3):
        found = hosts.names["z"][rank]
        assert (found.shape, found.min(), found.max()) == ((NUM,), rank, rank)
        assert hosts.names["small"][rank] == rank
    until(lambda: hosts.files() == before, 2.0, "the removal of what was fetched")


@pytest.mark.parametrize("source", [0, 2])
def test_state_of_a_rank_goes_to_the_ranks_of_all_hosts(hosts: TwoHosts, source: int) -> None:
    hosts.pool.run("import torch\nw = torch.full((300_000,), float(rank))")
    hosts.pool.sync_from(source, "w")
    assert dict(hosts.pool.run("w.mean().item()")) == dict.fromkeys(range(3), float(source))


def test_a_training_and_a_prediction(hosts: TwoHosts) -> None:
    data, model, before = samples(30_000), network(), hosts.files().keys()
    result = train_on(hosts.pool, model, data, epochs=1, batch_size=30_000)
    sent = [name for name in hosts.files().keys() - before if name.startswith("carried")]
    assert (len(result.history.steps), len(sent)) == (1, 1)
    assert not torch.equal(weights(result.model), weights(model))
    outputs = predict(result.model, data.tensors[0], pool=hosts.pool)
    torch.testing.assert_close(outputs, result.model(data.tensors[0]).detach())
    until(lambda: not any(".pt" in name for name in hosts.files()), 2.0, "the removal of results")


def test_when_a_rank_dies_meanwhile_the_next_one_takes_the_value(hosts: TwoHosts) -> None:
    hosts.names["x"] = np.full(NUM, 3.0)
    with ThreadPoolExecutor(1) as thread, hosts.stopped() as pid:
        failing = thread.submit(hosts.cell, "x.sum().item()")
        until(hosts.is_sending, 5.0, "the sending")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SpmdError) as caught:
            failing.result()
    assert {rank: one.ename for rank, one in caught.value.errors.items()} == {0: "EngineDiedError"}
    sent = hosts.files()
    assert hosts.cell("x.sum().item()") == [3.0 * NUM] * 3
    assert hosts.files() == sent


def test_who_gives_up_does_not_wait_for_the_rest(hosts: TwoHosts) -> None:
    before = hosts.files()
    with hosts.stopped():
        execution = hosts.pool.begin(np.sum, np.ones(NUM), ranks=(0, 1), on_output=unheard_output)
        until(hosts.is_sending, 5.0, "the sending")
        execution.interrupt()
        until(lambda: 0 in {*execution._futures.values()}, 5.0, "the end of the sending")
    with pytest.raises(SpmdError) as caught:
        execution.result()
    assert caught.value.errors[0].ename == "KeyboardInterrupt"
    until(lambda: hosts.files().keys() <= before.keys(), 5.0, "the removal of what was sent")
