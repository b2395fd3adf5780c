"""A cell on the ranks as a future, with real engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from gpupool.core.errors import SpmdError, TransferError
from gpupool.core.wire.requests import Where
from gpupool.pool.pool import Pool
from gpupool.spmd.cell import CellReport, Notebook, SpmdRun, States
from tests.support.processes import until
from tests.support.raising import raises
from tests.support.waits import until_there


class Notes:
    """A view that notes what it is told."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, str, Any]] = []
        self.num_ticks = 0
        self.reports: list[CellReport] = []
        self.on_second_tick: Callable[[], object] = lambda: None

    def on_output(self, rank: int, kind: str, content: Any) -> None:
        """A piece of output."""
        self.pieces.append((rank, kind, content))

    def notice(self, text: str | None) -> None:
        """Nothing."""

    def tick(self, states: States = dict) -> None:
        """Time passes."""
        self.num_ticks += 1
        if self.num_ticks == 2:
            self.on_second_tick()

    def finish(self, report: CellReport) -> None:
        """The end."""
        self.reports.append(report)


Begin = Callable[..., tuple[SpmdRun, Notes]]


@pytest.fixture
def begin(pool2: Pool) -> Begin:
    """Begins a cell on both ranks; gives the run and what its view notes."""

    def begin(source: str, **options: Any) -> tuple[SpmdRun, Notes]:
        notes = Notes()
        return SpmdRun(pool2, source, (0, 1), notes, **options), notes

    return begin


def wait_until_done(run: SpmdRun) -> None:
    until(run.done, 20.0, "its end")


def sleeping(folder: Path) -> str:
    """A cell that sleeps for a minute; each rank makes a file in the folder before."""
    return f"import time; open(f'{folder}/{{rank}}', 'w').close(); time.sleep(60)"


def sleeps(folder: Path) -> bool:
    """Whether both ranks do that."""
    return len(list(folder.iterdir())) == 2


def test_a_run_is_a_handle_until_its_result_is_asked_for(begin: Begin, tmp_path: Path) -> None:
    go = tmp_path / "go"
    run, notes = begin(f"{until_there(go)}\nrank * 2")
    assert not run.done()
    assert repr(run) == "SpmdRun(running)"
    go.touch()
    wait_until_done(run)
    assert repr(run) == "SpmdRun(done)"
    assert notes.reports == []  # nothing is shown before
    assert dict(run.result()) == {0: 0, 1: 2}
    assert run.result() is run.result()
    assert [report.result for report in notes.reports] == [run.result()]


def test_the_error_is_kept_and_shown_once(begin: Begin) -> None:
    run, notes = begin("print('said', flush=True)\n1 / 0")
    caught = []
    for _ in range(2):
        with pytest.raises(SpmdError) as error:
            run.result()
        caught.append(error.value)
    assert caught[0] is caught[1]
    (report,) = notes.reports
    assert report.error is caught[0]
    assert report.result is None
    assert {rank: output.text for rank, output in report.outputs.items()} == {
        0: "said\n",
        1: "said\n",
    }


def test_cancelling_an_awaited_run_interrupts_the_ranks(begin: Begin, tmp_path: Path) -> None:
    async def cancelled() -> None:
        run, _ = begin(sleeping(tmp_path))
        waiting = asyncio.ensure_future(run)
        await asyncio.sleep(0)  # what has not begun to wait is cancelled without a word
        while not sleeps(tmp_path):
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(SpmdError, match="KeyboardInterrupt"):
            await waiting

    asyncio.run(asyncio.wait_for(cancelled(), 60))


def test_an_interrupt_that_overtakes_its_call_ends_it(
    begin: Begin, pool2: Pool, tmp_path: Path
) -> None:
    before, _ = begin(until_there(go := tmp_path / "go"))
    run, _ = begin("import time\ntime.sleep(60)", timeout_s=50)
    pool2.engines.interrupt(dict.fromkeys((0, 1), run._execution.number))
    heard = pool2.engines.control(Where(), (0, 1)).values()  # after the interrupt
    assert not wait(heard, timeout=60).not_done
    pids = pool2.status().pids
    go.touch()
    before.result()
    with pytest.raises(SpmdError, match="KeyboardInterrupt"):
        run.result()
    assert dict(pool2.run("rank")) == {0: 0, 1: 1}
    assert pool2.status().pids == pids


@pytest.fixture
def notebook() -> Notebook:
    """A notebook without names."""
    return Notebook({}, str)


def test_a_name_that_the_cell_binds_too_is_sent_if_it_can_be(
    begin: Begin, notebook: Notebook
) -> None:
    def run(source: str) -> dict[int, Any]:
        return dict(begin(source, notebook=notebook)[0].result())

    notebook.names["x"] = 1
    assert run("x") == {0: 1, 1: 1}
    notebook.names["x"] = threading.Lock()
    assert run("def f(): return x\nx = rank\nf()") == {0: 0, 1: 1}
    notebook.names["x"] = threading.Lock()
    with raises(SpmdError, "x", ranks=(1,), ename="NameError") as caught:
        run("if rank == 0: x = 5\nx")  # which is not what the rank had under that name before
    assert "x was not sent: TypeError" in caught.value.first.hint
    notebook.names["x"] = threading.Lock()
    with raises(TransferError, "x"):
        run("x")


def test_of_code_that_ranks_have_the_globals_are_followed(begin: Begin, notebook: Notebook) -> None:
    def run(source: str) -> dict[int, Any]:
        return dict(begin(source, notebook=notebook)[0].result())

    notebook.names["n"] = 1
    run("class A:\n    def v(self): return n\nx = A().v()\na = A()")
    run("b = a")
    notebook.names["n"] = 2
    assert run("b.v()") == {0: 2, 1: 2}
    notebook.names["n"] = threading.Lock()
    assert run("x") == {0: 1, 1: 1}  # a number reads nothing
    with raises(SpmdError, "'n'", ename="NameError"):  # it was looked for, and could not be sent
        run("b.v()")
