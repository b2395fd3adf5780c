"""Values on real ranks: what they cost, what is let go, and what happens when a rank cannot."""

from __future__ import annotations

import gc
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpupool import Pool, PoolError, SpmdError, TransferError
from gpupool.notebook.cells.views import QuietView
from gpupool.pool.result import SpmdResult
from gpupool.spmd.cell import Notebook as At
from gpupool.spmd.cell import SpmdRun
from tests.support.processes import engine_pid, open_files, press_when, wait_for
from tests.support.raising import raises, same_on

LARGE = 4 << 20  # bytes; beyond what travels in a message


def mapped(pid: int) -> set[str]:
    """Which of our memory files a process has mapped."""
    with open(f"/proc/{pid}/maps") as maps:
        return {line.split()[4] for line in maps if "memfd:gpupool" in line}


# What earlier tests have left may go at any moment: only what is new counts.
Held = tuple[set[tuple[int, str]], set[str]]


def held(pid: int) -> Held:
    """The descriptors that a process has open, and the memory files it has mapped."""
    return set(open_files(pid).items()), mapped(pid)


def nothing_new(now: Held, before: Held) -> bool:
    return now[0] <= before[0] and now[1] <= before[1]


def ignore(rank: int, kind: str, content: object) -> None:
    """Output that nobody looks at."""


class Notebook:
    """The notebook's names, and cells that read and assign them."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.names: dict[str, Any] = {}

    def cell(self, source: str, reads: str = "", assigns: str = "", ranks: str = "all") -> Any:
        variables, chosen = self.pool.variables, self.pool.select_ranks(ranks)
        shipment = variables.ship(reads.split(), self.names, chosen)
        execution = self.pool.begin(
            source,
            ranks=chosen,
            on_output=ignore,
            bindings=variables.bindings(shipment, chosen, assigns.split()),
        )
        succeeded = False
        try:
            replies = execution.result()
            succeeded = True
        finally:
            variables.take_back(self.names, assigns.split(), [], execution.names, succeeded)
        return [reply.text for _, reply in sorted(replies.items())]


@pytest.fixture
def notebook(pool2: Pool) -> Notebook:
    """A notebook without names."""
    return Notebook(pool2)


def test_memory_is_mapped_by_all_ranks_and_given_back(notebook: Notebook, pool2: Pool) -> None:
    pids = [os.getpid(), engine_pid(pool2, 0), engine_pid(pool2, 1)]
    notebook.cell("globals().pop('x', None); import gc; gc.collect()")
    gc.collect()  # what tests before have left
    before = [held(pid) for pid in pids]
    for number in range(10):
        notebook.names["x"] = np.full(LARGE, number, np.uint8)
        assert notebook.cell("x = x; int(x[-1])", "x") == [str(number)] * 2
    more = [len(mapped(pid) - was) for pid, (_, was) in zip(pids, before, strict=True)]
    assert more == [0, 1, 1]
    del notebook.names["x"]
    notebook.cell("del x; import gc; gc.collect()")
    notebook.cell("1")
    gc.collect()
    assert all(nothing_new(held(pid), was) for pid, was in zip(pids, before, strict=True))


def test_a_value_is_fetched_through_memory_too(notebook: Notebook, pool2: Pool) -> None:
    notebook.cell("x = {'w': torch.full((1 << 20,), float(rank)), 'n': rank}", assigns="x")
    before = held(os.getpid())
    fetched = notebook.names["x"][1]
    assert (fetched["n"], fetched["w"].sum().item()) == (1, 1 << 20)
    fetched["w"][0] = 5  # ours to write
    assert notebook.names["x"][1]["w"][0] == 1
    del fetched
    gc.collect()
    assert nothing_new(held(os.getpid()), before)


def test_a_constant_comes_once_and_goes_with_its_handle(notebook: Notebook, pool2: Pool) -> None:
    pid = engine_pid(pool2, 1)
    before = mapped(pid)
    notebook.names["x"] = pool2.put(np.ones(LARGE, np.uint8))
    assert notebook.cell("int(x.sum())", "x") == [str(LARGE)] * 2
    assert notebook.cell("x = x[:2]; x.tolist()", "x", "x") == ["[1, 1]"] * 2
    del notebook.names["x"]
    gc.collect()
    notebook.cell("del x")
    assert mapped(pid) <= before


def test_a_restarted_rank_gets_everything_again(notebook: Notebook, pool2: Pool) -> None:
    notebook.names |= {"x": np.ones(LARGE, np.uint8), "y": [1], "c": pool2.put("constant")}
    notebook.cell("x, y, c", "x y c")
    notebook.cell("y.append(2); z = rank", "y", "z")
    pool2.restart([1])
    assert notebook.cell("int(x.sum()), y, c", "x y c") == [
        f"({LARGE}, [1, 2], 'constant')",
        f"({LARGE}, [1], 'constant')",
    ]
    assert sorted(pool2["z"].info) == [0]
    with raises(PoolError, "z", "restarted", ranks=(1,)):
        pool2["z"].gather()


def test_a_new_rank_repeats_the_imports_of_earlier_cells(
    pool2: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fleeting.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}

    def cell(source: str) -> SpmdResult:
        return SpmdRun(
            pool2, source, [0, 1], QuietView("everything"), notebook=At(names, str)
        ).result()

    cell("import json as j, os.path, string, fleeting\nfrom math import floor as down\nimport csv")
    cell("string = 5\ndel csv")
    (tmp_path / "fleeting.py").unlink()
    pool2.restart([1])
    first = cell(
        "j.dumps(down(2.5)) + os.path.sep, 'csv' in globals(), string if rank == 0 else ''"
    )
    assert first[1] == ("2/", False, "")
    assert first.text(0) == ""
    assert "rank 1 is new, and `import fleeting` of an earlier cell cannot be rep" in first.text(1)
    assert cell("j").text(1) == ""  # once
    for name, way_on in {
        "fleeting": "fleeting was lost with rank 1, which was restarted; import it there again)",
        "string": "pool.sync_from(0, 'string'",
    }.items():
        with raises(SpmdError, name, way_on, ranks=(1,), ename="NameError") as caught:
            cell(name)
        assert " rank 1, " in caught.value.first.evalue
    with raises(SpmdError, "'nowhere'", ranks=(0, 1), ename="NameError") as caught:
        cell("nowhere")
    assert same_on(caught.value, 0, 1)


class OnlyOnRank:
    """Can be unpickled on one rank alone."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __setstate__(self, state: dict[str, Any]) -> None:
        if int(os.environ["RANK"]) != state["rank"]:
            raise ValueError("not for this rank")


def test_if_one_rank_cannot_read_a_value_none_runs(notebook: Notebook, pool2: Pool) -> None:
    notebook.cell("ran = 0")
    notebook.names |= {"x": OnlyOnRank(0), "y": 5}
    with raises(TransferError, "x", " rank 1: ", "ValueError: not for this rank"):
        notebook.cell("ran = 1; y", "x y")
    assert notebook.cell("ran") == ["0", "0"]
    assert notebook.cell("y", "y") == ["5", "5"]


class Slow:
    """Takes a while to unpickle."""

    def __reduce__(self) -> Any:
        return time.sleep, (60,)


def test_a_transfer_can_be_interrupted(notebook: Notebook, pool2: Pool) -> None:
    notebook.names["x"] = Slow()
    presser = press_when(lambda: pool2.status().state == "busy")
    with pytest.raises(SpmdError, match="KeyboardInterrupt"):
        notebook.cell("x", "x")
    presser.join()
    notebook.names["x"] = 3
    assert notebook.cell("x", "x") == ["3", "3"]


def test_a_cell_in_the_background_takes_large_values_along(pool2: Pool, tmp_path: Path) -> None:
    names: dict[str, Any] = {"x": np.ones(LARGE, np.uint8)}
    go = tmp_path / "go"
    running = pool2.begin(wait_for(go), ranks=(0, 1), on_output=ignore)
    notebook = At(names, str, at_once=True)
    run = SpmdRun(pool2, "n = int(x.sum())", (0, 1), QuietView("everything"), notebook=notebook)
    assert not running.done()  # it was not waited for
    go.touch()
    del names["x"]
    run.result()
    assert names["n"].gather() == [LARGE, LARGE]


def test_a_handle_of_what_was_assigned_anew_says_so(notebook: Notebook, pool2: Pool) -> None:
    notebook.cell("x = 1", assigns="x")
    old = notebook.names["x"]
    notebook.cell("x = 2", assigns="x")
    with raises(PoolError, "x") as caught:
        _ = old[0]
    notebook.names["y"] = {"old": old}
    with raises(TransferError, "y", f"PoolError: {caught.value}"):
        notebook.cell("y", "y")


def test_what_a_composite_says_of_itself(notebook: Notebook) -> None:
    notebook.cell("x = torch.ones(2, 3 + rank)", assigns="x")
    x = notebook.names["x"]
    assert (len(x), str(x), repr(x)) == (2, "x", "Composite(x, 2 ranks)")
    assert [str(x.info[rank]) for rank in (0, 1)] == [
        "Tensor 2x3 float32 cpu",
        "Tensor 2x4 float32 cpu",
    ]
    assert x.shape.gather() == [torch.Size([2, 3]), torch.Size([2, 4])]
    assert "reshape" in dir(x)
    assert (hasattr(x, "nonsense"), hasattr(x, "_repr_html_")) == (False, False)
    assert torch.equal(x[-1], torch.ones(2, 4))
    with pytest.raises(IndexError, match=r"0 to 1\..*`%spmd x\[2\]`"):
        _ = x[2]
    with pytest.raises(TypeError, match=r"`%spmd x\(\.\.\.\)`"):
        x()
    with pytest.raises(TypeError, match=r"`bool\(x\[0\]\)`"):
        bool(x)
    with pytest.raises(TypeError, match=r"`x\.lr = \.\.\.`"):
        x.lr = 0.1


def test_while_the_ranks_are_busy_a_composite_does_not_wait(
    notebook: Notebook, pool2: Pool, tmp_path: Path
) -> None:
    notebook.cell("x = [rank]", assigns="x")
    x = notebook.names["x"]
    go = tmp_path / "go"
    running = pool2.begin(wait_for(go), ranks=(0, 1), on_output=ignore)
    assert pool2.status().state == "busy"
    assert str(x.info[1]) == "list of 1"  # known already
    assert "append" not in dir(x)
    with raises(PoolError) as caught:
        _ = x[0]
    with pytest.raises(AttributeError, match=re.escape(f"x.append: {caught.value}")):
        _ = x.append
    go.touch()
    running.result()
    assert x.gather() == [[0], [1]]


def test_secrets_in_a_shown_value_are_hidden(pool2: Pool) -> None:
    os.environ["GPUPOOL_TEST_KEY"] = "a-value-that-is-secret"
    pool2.propagate_env("GPUPOOL_TEST_KEY")
    pool2.run("import os\nx = [os.environ['GPUPOOL_TEST_KEY']]")
    (info,) = {str(i.text) for i in pool2.variables.look(pool2["x"], 100).values()}
    assert info == "['[hidden]']"
    pool2.propagate_env("GPUPOOL_TEST_KEY", unset=True)


def test_what_was_sent_with_a_cell_that_never_ran_is_sent_again(
    notebook: Notebook, pool2: Pool
) -> None:
    running = pool2.begin("import time; time.sleep(60)", ranks=[0, 1], on_output=ignore)
    notebook.names["x"] = [7]
    shipment = pool2.variables.ship(["x"], notebook.names, [0, 1])
    bindings = pool2.variables.bindings(shipment, [0, 1], [])
    waiting = pool2.begin("x", ranks=[0, 1], on_output=ignore, bindings=bindings)
    waiting.interrupt()
    assert waiting.wait(30)
    running.interrupt()
    assert running.wait(30)
    assert notebook.cell("x", "x") == ["[7]", "[7]"]
