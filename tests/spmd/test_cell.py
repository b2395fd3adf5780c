"""A cell on real ranks: a stop that overtakes it, and the names that it is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from gpupool.core.errors import SpmdError
from gpupool.core.wire.requests import Where
from gpupool.notebook.cells.views import QuietView
from gpupool.pool.pool import Pool
from gpupool.spmd.cell import Notebook, SpmdRun
from tests.support.raising import raises
from tests.support.waits import until_there

Begin = Callable[..., SpmdRun]
Run = Callable[[str], dict[int, Any]]


@pytest.fixture
def begin(pool2: Pool) -> Begin:
    return lambda source, **options: SpmdRun(pool2, source, (0, 1), QuietView(), **options)


def test_an_interrupt_that_overtakes_its_call_ends_it(
    begin: Begin, pool2: Pool, tmp_path: Path
) -> None:
    before = begin(until_there(go := tmp_path / "go"))
    run = begin("import time\ntime.sleep(60)", timeout_s=50)
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
    return Notebook({}, str)


@pytest.fixture
def run(begin: Begin, notebook: Notebook) -> Run:
    return lambda source: dict(begin(source, notebook=notebook).result())


def test_a_name_that_the_cell_binds_too_is_sent_if_it_can_be(run: Run, notebook: Notebook) -> None:
    notebook.names["x"] = 1
    assert run("x") == {0: 1, 1: 1}
    notebook.names["x"] = threading.Lock()
    assert run("def f(): return x\nx = rank\nf()") == {0: 0, 1: 1}
    notebook.names["x"] = threading.Lock()
    with raises(SpmdError, "x", ranks=(1,), ename="NameError") as caught:
        run("if rank == 0: x = 5\nx")  # which is not what the rank had under that name before
    assert "x was not sent: TypeError" in caught.value.first.hint


def test_of_code_that_ranks_have_the_globals_are_followed(run: Run, notebook: Notebook) -> None:
    notebook.names["n"] = 1
    run("class A:\n    def v(self): return n\nx = A().v()\na = A()")
    run("b = a")
    notebook.names["n"] = 2
    assert run("b.v()") == {0: 2, 1: 2}
    notebook.names["n"] = threading.Lock()
    assert run("x") == {0: 1, 1: 1}  # a number reads nothing
    with raises(SpmdError, "'n'", ename="NameError"):  # it was looked for, and could not be sent
        run("b.v()")
