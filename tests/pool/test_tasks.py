"""Tasks: functions that run on one rank each, with real ranks and real deaths."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import gpupool
from gpupool import OptionsError, Pool, SpmdError, TransferError
from gpupool.pool.tasks import Task
from tests.support.processes import engine_pid, press_when, until
from tests.support.raising import raises

SOON_S = 30.0
FUNCTIONS = """
import os, time
import gpupool
def wait_for(go):
    while go is not None and not os.path.exists(go): time.sleep(0.01)
def begins(path, go=None, value=None):
    with open(path, "a") as file: file.write(f"{rank}\\n")
    wait_for(go)
    return value
def reports(go, num_steps):
    for step in range(num_steps):
        print("step", step)
        gpupool.report(step, loss=1 / (step + 1))
        wait_for(go)
def when(number):
    began = time.monotonic()
    time.sleep(0.02)
    return number, rank, began, time.monotonic()
def spins(path):
    begins(path)
    while True: pass
def where(): return rank, str(device), torch.distributed.is_initialized()
def together(): torch.distributed.all_reduce(torch.ones(1))
"""


class Row:
    """A pool, functions of the notebook, and tasks that begin and wait for `go`."""

    def __init__(self, pool: Pool, names: dict[str, Any], folder: Path) -> None:
        exec(FUNCTIONS, names)
        self.pool, self.names, self.folder, self.go = pool, names, folder, folder / "go"

    def submit(self, name: str, **options: Any) -> Task:
        return self.pool.submit(self.names["begins"], self.folder / name, self.go, name, **options)

    def ranks(self, name: str) -> list[int]:
        path = self.folder / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def wait_for(self, names: Iterable[str], times: int = 1) -> None:
        until(lambda: all(len(self.ranks(name)) == times for name in names), SOON_S, names)

    def kill(self, *tasks: Task) -> None:
        for task in tasks:
            os.kill(engine_pid(self.pool, task.rank), signal.SIGKILL)

    def is_whole(self) -> bool:
        found = self.pool.run("x = torch.ones(1); dist.all_reduce(x); x.item()")
        return set(found.values()) == {float(self.pool.world_size)}


@pytest.fixture
def row(pool2: Pool, names: dict[str, Any], tmp_path: Path) -> Row:
    return Row(pool2, names, tmp_path)


def ename(task: Task) -> str:
    with pytest.raises(SpmdError) as caught:
        task.result(SOON_S)
    return caught.value.first.ename


def test_each_rank_runs_one_task_after_the_other_in_the_order_of_submission(row: Row) -> None:
    tasks = [row.pool.submit(row.names["when"], number) for number in range(8)]
    done = [task.result(SOON_S) for task in tasks]
    assert [(one[0], one[1]) for one in done] == [(n, one.rank) for n, one in enumerate(tasks)]
    for rank in (0, 1):
        own = [one for one in done if one[1] == rank]
        assert len(own) > 1
        assert all(one[3] <= later[2] for one, later in itertools.pairwise(own))


def test_arguments_and_globals_are_packed_at_submit(row: Row) -> None:
    exec("factor = 2\ndef scaled(values): return [factor * one for one in values]", row.names)
    values = [1, 2]
    tasks = [row.submit("a"), row.submit("b"), row.pool.submit(row.names["scaled"], values)]
    values.append(3)
    row.names["factor"] = 10
    tasks.append(row.pool.submit(row.names["scaled"], values))
    row.go.touch()
    with raises(TransferError):
        row.pool.submit(row.names["scaled"], threading.Lock())
    assert [task.result(SOON_S) for task in tasks] == ["a", "b", [2, 4], [10, 20, 30]]


def test_a_task_has_a_rank_and_its_device_and_no_group(row: Row) -> None:
    task = row.pool.submit(row.names["where"])
    assert task.result(SOON_S) == (task.rank, "cpu", False)
    with raises(SpmdError, "process group") as caught:
        row.pool.submit(row.names["together"]).result(SOON_S)
    assert "pool.run" in caught.value.first.traceback  # what to do instead


def test_what_a_task_prints_and_reports_is_there_while_it_runs(row: Row) -> None:
    heard: list[Any] = []
    task = row.pool.submit(row.names["reports"], row.go, 2, on_report=heard.append)
    pruned = row.pool.submit(row.names["reports"], row.go, 1000)
    until(lambda: len(heard) == 1 == len(pruned.reports), SOON_S)
    assert (task.done(), task.text, task.reports) == (False, "step 0\n", heard)
    pruned.prune()
    row.go.touch()
    assert task.result(SOON_S) is None
    assert heard == task.reports
    assert [(one.step, one.values) for one in heard] == [(0, {"loss": 1.0}), (1, {"loss": 0.5})]
    assert 0 <= heard[0].elapsed_s <= heard[1].elapsed_s <= task.elapsed_s
    assert task.text == "step 0\nstep 1\n"
    assert ename(pruned) == "Pruned"
    with raises(OptionsError, "pool.submit"):  # this is no task
        gpupool.report(0, loss=1.0)


def test_tasks_are_cancelled_or_interrupted_and_end_with_the_pool(row: Row) -> None:
    pids = row.pool.status().pids
    first, second, third, fourth = (row.submit(name) for name in "abcd")
    row.wait_for("ab")
    assert (first.cancel(), third.cancel(), fourth.elapsed_s) == (False, True, 0.0)
    fourth.interrupt()
    first.interrupt()
    assert ename(first) == "KeyboardInterrupt"
    assert [one.cancelled() for one in (second, third, fourth)] == [False, True, True]
    endless = row.pool.submit(row.names["spins"], row.folder / "endless")
    row.wait_for(["endless"])
    endless.interrupt()
    assert ename(endless) == "KeyboardInterrupt"
    assert row.pool.status().pids == pids
    fifth, sixth = row.submit("e"), row.submit("f")
    row.wait_for("e")
    row.pool.stop()
    until(lambda: second.done() and fifth.done() and sixth.done(), SOON_S)
    assert [row.ranks(name) for name in "cdf"] == [[], [], []]


def test_a_task_is_tried_again_where_its_rank_has_died_and_not_where_it_raises(row: Row) -> None:
    once, twice = (row.submit(name, retries=1) for name in "ot")
    row.wait_for("ot")
    row.kill(once, twice)  # at the same time
    row.wait_for("ot", times=2)
    row.kill(twice)
    assert ename(twice) == "EngineDiedError"
    row.go.touch()
    assert once.result(SOON_S) == "o"
    assert [once.rank, twice.rank] == [row.ranks("o")[1], row.ranks("t")[1]]
    raising = row.pool.submit(row.names["begins"], row.folder / "r", go=[], retries=3)
    assert ename(raising) == "TypeError"
    assert row.ranks("r") == [raising.rank]
    assert row.is_whole()


def test_a_cell_on_all_ranks_gets_its_turn_between_tasks(row: Row) -> None:
    tasks = [row.submit("a"), row.submit("b")]
    row.wait_for("ab")
    tasks += [row.pool.submit(row.names["begins"], row.folder / "all") for _ in range(30)]
    source = f"if rank == 1: open({str(row.folder / 'all')!r}, 'a').write('-1\\n')"
    cell = row.pool.begin(source, ranks=(0, 1), on_output=lambda *_: None)
    assert cell.waits_for == ["a task"]
    row.go.touch()
    assert cell.wait(SOON_S)
    assert [task.result(SOON_S) for task in tasks] == ["a", "b", *[None] * 30]
    assert row.ranks("all").index(-1) <= 4  # one on each rank, and one ahead


def test_results_of_map_come_in_order_or_as_they_are_there(row: Row) -> None:
    calls = [row.folder / name for name in "abc"], [row.go, None, None]
    results = row.pool.map(row.names["begins"], *calls, itertools.count(), ordered=False)
    assert {next(results), next(results)} == {1, 2}
    row.go.touch()
    assert list(results) == [0]
    assert list(row.pool.map(row.names["begins"], *calls, "xyz")) == ["x", "y", "z"]
    with row.pool.executor as executor:  # which ends without the pool
        assert list(executor.map(row.names["begins"], *calls, "xyz")) == ["x", "y", "z"]


def test_an_error_ends_map_or_takes_its_place(row: Row) -> None:
    one, two, three = row.pool.map(int, ["1", "two", "3"], return_exceptions=True)
    assert (one, two.first.ename, three) == (1, "ValueError", 3)
    results = row.pool.map(int, itertools.chain(["1", "two"], itertools.repeat("3")))
    assert next(results) == 1
    with raises(SpmdError, ename="ValueError"):
        next(results)


def test_stop_while_map_waits_ends_what_runs_and_begins_nothing(row: Row) -> None:
    numbers = itertools.count()
    paths = (row.folder / str(number) for number in numbers)
    results = row.pool.map(row.names["begins"], paths, itertools.repeat(row.go))
    presser = press_when(lambda: bool(row.ranks("0") and row.ranks("1")), ("pool.py", "map"))
    with pytest.raises(KeyboardInterrupt):
        next(results)
    presser.join()
    until(lambda: row.pool.status().state == "idle", SOON_S)
    assert row.ranks("2") == []
    assert next(numbers) <= 2 * row.pool.world_size  # no more of the input than ranks need
    assert row.is_whole()
