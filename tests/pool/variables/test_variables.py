"""Values on real ranks: what they cost, what is let go, and what happens when a rank cannot."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpupool import Pool, PoolError, SpmdError, TransferError
from gpupool.notebook.cells.line_view import QuietView
from gpupool.spmd.cell import Notebook as At
from gpupool.spmd.cell import SpmdRun
from tests.support.processes import engine_pid, open_files, press_when
from tests.support.raising import raises, same_on

LARGE = 4 << 20  # bytes; beyond what travels in a message


def mapped(pid: int) -> set[str]:
    """Which of our memory files a process has mapped."""
    with open(f"/proc/{pid}/maps") as maps:
        return {line.split()[4] for line in maps if "memfd:gpupool" in line}


def ignore(rank: int, kind: str, content: object) -> None:
    """Output that nobody looks at."""


class Notebook:
    """The notebook's names, and cells that read and assign them."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.names: dict[str, Any] = {}

    def begin(self, source: str, *, at_once: bool = False) -> SpmdRun:
        at = At(self.names, str, at_once=at_once)
        return SpmdRun(self.pool, source, (0, 1), QuietView(), notebook=at)

    def cell(self, source: str) -> list[str]:
        """The values of a cell, as text."""
        result = self.begin(source).result()
        return [result.value_text(rank) for rank in result]


@pytest.fixture
def notebook(pool2: Pool) -> Notebook:
    """A notebook without names."""
    return Notebook(pool2)


def test_memory_is_mapped_by_all_ranks_and_given_back(notebook: Notebook, pool2: Pool) -> None:
    pids = [os.getpid(), engine_pid(pool2, 0), engine_pid(pool2, 1)]
    notebook.cell("1")
    gc.collect()  # what tests before have left: it may go at any moment, only what is new counts
    before = [(set(open_files(pid).items()), mapped(pid)) for pid in pids]
    for number in range(10):
        notebook.names["x"] = np.full(LARGE, number, np.uint8)
        assert notebook.cell("int(x[-1])") == [str(number)] * 2
    more = [len(mapped(pid) - was) for pid, (_, was) in zip(pids, before, strict=True)]
    assert more == [0, 1, 1]
    notebook.names["x"] = pool2.put(np.ones(LARGE, np.uint8))
    assert notebook.cell("int(x.sum())") == [str(LARGE)] * 2
    assert notebook.cell("x = x[:2]; x.tolist()") == ["[1, 1]"] * 2
    notebook.cell("x = torch.full((1 << 20,), float(rank))")
    fetched = notebook.names["x"][1]  # through such memory too
    assert fetched.sum().item() == 1 << 20
    fetched[0] = 5  # ours to write
    assert notebook.names["x"][1][0] == 1
    del fetched
    notebook.cell("del x")
    notebook.cell("1")
    gc.collect()
    for pid, (files, maps) in zip(pids, before, strict=True):
        assert set(open_files(pid).items()) <= files
        assert mapped(pid) <= maps


def test_a_restarted_rank_gets_everything_again(notebook: Notebook, pool2: Pool) -> None:
    notebook.names |= {"x": np.ones(LARGE, np.uint8), "y": [1], "c": pool2.put("constant")}
    notebook.cell("x, y, c")
    notebook.cell("y.append(2); z = rank")
    pool2.restart([1])
    assert notebook.cell("int(x.sum()), y, c") == [
        f"({LARGE}, [1, 2], 'constant')",
        f"({LARGE}, [1], 'constant')",
    ]
    assert sorted(pool2["z"].info) == [0]
    with raises(PoolError, "z", "restarted", ranks=(1,)):
        pool2["z"].gather()


def test_a_new_rank_repeats_the_imports_of_earlier_cells(
    notebook: Notebook, pool2: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fleeting.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def cell(source: str) -> Any:
        return notebook.begin(source).result()

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
    way_on = "string was lost with rank 1, which was restarted; pool.sync_from(0, 'string') copies"
    with raises(SpmdError, "string", way_on, ranks=(1,), ename="NameError"):
        cell("string")
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


def test_if_one_rank_cannot_read_a_value_none_runs(notebook: Notebook) -> None:
    notebook.cell("ran = 0")
    notebook.names |= {"x": OnlyOnRank(0), "y": 5}
    with raises(TransferError, "x", " rank 1: ", "ValueError: not for this rank"):
        notebook.cell("ran = 1; x, y")
    assert notebook.cell("ran, y") == ["(0, 5)"] * 2


class Slow:
    """Takes a while to unpickle."""

    def __reduce__(self) -> Any:
        return time.sleep, (60,)


def test_a_transfer_can_be_interrupted(notebook: Notebook, pool2: Pool) -> None:
    notebook.names["x"] = Slow()
    presser = press_when(lambda: pool2.status().state == "busy")
    with pytest.raises(SpmdError, match="KeyboardInterrupt"):
        notebook.cell("x")
    presser.join()
    notebook.names["x"] = 3
    assert notebook.cell("x") == ["3", "3"]


def test_what_a_composite_says_of_itself(notebook: Notebook) -> None:
    notebook.cell("x = torch.ones(2, 3 + rank)")
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
    for use in (x.__call__, x.__bool__, lambda: x + 1, lambda: setattr(x, "lr", 0.1)):
        with pytest.raises(TypeError, match=r"x is on the ranks: .*x\[0\].*x\.gather\(\)"):
            use()


def test_what_was_sent_with_a_cell_that_never_ran_is_sent_again(
    notebook: Notebook, pool2: Pool
) -> None:
    running = pool2.begin("import time; time.sleep(60)", ranks=[0, 1], on_output=ignore)
    notebook.names["x"] = [7]
    waiting = notebook.begin("x")
    waiting.interrupt()
    with pytest.raises(SpmdError, match="KeyboardInterrupt"):
        waiting.result()
    running.interrupt()
    assert running.wait(30)
    assert notebook.cell("x") == ["[7]", "[7]"]
