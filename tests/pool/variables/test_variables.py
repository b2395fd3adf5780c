"""Values on real ranks: what they cost, what is let go, what goes with a rank, what is copied."""

from __future__ import annotations

import gc
import os
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpupool import Composite, Pool, PoolError, SpmdError, TransferError
from gpupool.notebook.cells.views import QuietView
from gpupool.pool.calls.output import SpmdResult
from gpupool.pool.engines.client import unheard_output
from gpupool.spmd.cell import Notebook as At
from gpupool.spmd.cell import SpmdRun
from tests.support.processes import engine_pid, open_files, press_when
from tests.support.raising import raises

LARGE = 4 << 20  # bytes; beyond what travels in a message


def mapped(pid: int) -> set[str]:
    with open(f"/proc/{pid}/maps") as maps:
        return {line.split()[4] for line in maps if "memfd:gpupool" in line}


class Notebook:
    """The notebook's names, and cells that read and assign them."""

    def __init__(self, pool: Pool, names: dict[str, Any]) -> None:
        self.pool, self.names = pool, names

    def begin(self, source: str) -> SpmdRun:
        at = At(self.names, str)
        return SpmdRun(self.pool, source, self.pool.select(None), QuietView(), notebook=at)

    def run(self, source: str) -> SpmdResult:
        return self.begin(source).result()

    def cell(self, source: str) -> list[str]:
        result = self.run(source)
        return [result.value_text(rank) for rank in result]


@pytest.fixture
def notebook(pool2: Pool) -> Notebook:
    return Notebook(pool2, {})


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
    gc.collect()  # as above: else a cell that was faster than its own thread may have it still
    notebook.cell("1")
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
    cell = notebook.run
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


class OnlyOnRank:
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
    running = pool2.begin("import time; time.sleep(60)", ranks=[0, 1], on_output=unheard_output)
    notebook.names["x"] = [7]
    waiting = notebook.begin("x")
    waiting.interrupt()
    with pytest.raises(SpmdError, match="KeyboardInterrupt"):
        waiting.result()
    running.interrupt()
    assert running.wait(30)
    assert notebook.cell("x") == ["[7]", "[7]"]


def test_the_notebook_can_let_go_of_what_it_has_sent(notebook: Notebook, pool2: Pool) -> None:
    known = {*pool2.variables.parcels.by_number}  # constants of tests before
    notebook.names["x"] = np.zeros(1000)
    alive = weakref.ref(notebook.names["x"])
    notebook.cell("x[0] = 5")
    notebook.names["y"] = notebook.names.pop("x")
    assert notebook.cell("y[0].item()") == ["5.0"] * 2  # which was not sent again
    del notebook.names["y"]
    assert alive() is None
    notebook.cell("1")
    assert pool2.variables.parcels.by_number.keys() <= known


def test_a_constant_stays_what_it_is_whatever_becomes_of_the_value(
    notebook: Notebook, pool2: Pool
) -> None:
    array = np.zeros(300 << 20, np.uint8)  # there is no limit
    notebook.names |= {"constant": pool2.put(array), "pair": [array[:2], array]}
    array[0] = 1
    with raises(TransferError, "pair", "256 MiB"):
        notebook.cell("pair")  # which is no part of the constant
    assert notebook.cell("constant[0].item(), len(constant)") == [f"(0, {300 << 20})"] * 2


def test_equal_contents_are_in_memory_once_and_yet_apart(notebook: Notebook, pool2: Pool) -> None:
    def num_bytes() -> int:
        return sum(num_bytes for num_bytes, _ in pool2.variables.buffers._stored)

    notebook.cell("1")
    gc.collect()
    before = num_bytes()
    one, other = np.ones(1 << 20), np.ones(1 << 20)
    notebook.names |= {"x": {"a": one, "b": other}, "y": [one[:], "more"]}
    assert notebook.cell("x['a'][0] = 5; x['b'][0].item(), y[0][0].item()") == ["(1.0, 1.0)"] * 2
    assert one.nbytes <= num_bytes() - before < 1.1 * one.nbytes
    one[0] = 7  # changed: both are sent again, and the old content goes when nobody has it
    assert notebook.cell("x['a'][0].item(), y[0][0].item()") == ["(7.0, 7.0)"] * 2
    assert num_bytes() - before < 2.1 * one.nbytes


# ---- state of one rank for the others ----------------------------------------------------------

MODEL = """
torch.manual_seed(0)
# no bias before the norm: its gradient is noise, which Adam would make large
hidden = torch.nn.Linear(6, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.ReLU()
net = torch.nn.Sequential(*hidden, torch.nn.Linear(16, 1)).double()
model = torch.nn.parallel.DistributedDataParallel(net, static_graph=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
step = 0
"""
STEPS = """
for _ in range(5):
    g = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 6, generator=g, dtype=torch.float64)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
"""
END = "torch.cat([loss.detach()[None], *(v.flatten() for v in net.state_dict().values())]).tolist()"


def test_training_goes_on_after_a_restart_as_if_nothing_had_been(pool3: Pool) -> None:
    expected = pool3.run(MODEL + STEPS + STEPS + END)
    pool3.run(MODEL + STEPS)
    pool3.restart([1])
    pool3.sync_from(0, "net", "model", "optimizer", "scheduler", "step")
    found = pool3.run(STEPS + END, timeout_s=60)
    for rank in range(3):
        assert found[rank] == pytest.approx(expected[rank], abs=1e-12)


def test_what_fits_is_changed_in_place_and_the_rest_is_bound_anew(pool3: Pool) -> None:
    pool3.run("t = torch.full((3,), float(rank)); of_t = [t]; n = rank; d = {'t': t}; u = t[:1]")
    pool3.sync_from(1, "t", "n")
    assert dict(pool3.run("(t is of_t[0], t.tolist(), n, u.item())")) == dict.fromkeys(
        range(3), (True, [1.0] * 3, 1, 1.0)
    )
    # a dict is bound anew, so the tensor that is in it is too: they stay one
    pool3.run("t += rank; d['n'] = rank")
    assert pool3.sync_from(2, "d", "t", ranks=[0]) == (0,)
    answers = dict(pool3.run("(t is d['t'], t is of_t[0], t.tolist(), d['n'])"))
    assert answers[0] == (True, False, [3.0] * 3, 2)
    assert answers[1] == (True, True, [2.0] * 3, 1)


REFUSED = """
import threading
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
one = rank
class Holder: pass
locked = {"a": Holder()}
locked["a"].lock = threading.Lock()
mesh = init_device_mesh("cpu", (3,))
shard = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
"""


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("nosuch", "'nosuch'"),
        ("locked", ("TypeError: ", "lock", "['locked']['a'].lock")),
        ("shard", "TypeError: a DTensor "),
    ],
)
def test_what_cannot_be_copied_changes_nothing(
    pool3: Pool, name: str, shown: str | tuple[str, ...]
) -> None:
    pool3.run(REFUSED)
    with raises(PoolError, name, shown, ranks=(0,)):
        pool3.sync_from(0, "one", name)
    assert dict(pool3.run("one")) == {0: 0, 1: 1, 2: 2}


def test_a_model_of_the_notebook_that_ranks_have_trained_is_copied_to_the_new_one(
    pool3: Pool, names: dict[str, Any]
) -> None:
    """The new rank would get the notebook's own, untrained, with the next cell."""
    names["model"] = torch.nn.Linear(2, 1)
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1, momentum=0.9)
    names["trace"] = []
    train = "optimizer.zero_grad(); model(torch.ones(1, 2)).sum().backward(); optimizer.step()"
    notebook = Notebook(pool3, names)
    notebook.run(f"{train}\ntrace.append(1)\nx = torch.zeros(rank + 1)")
    x = names["x"]
    pool3.restart([1])
    pool3.sync_from(0, "model", "optimizer", "trace")
    assert sorted(x.info) == [0, 2]
    pool3.sync_from(2, "x", ranks=[1])
    assert (names["x"] is x, x.info[1].shape) == (True, (3,))
    assert isinstance(names["model"], torch.nn.Linear)
    look = "[model.weight.sum().item(), len(optimizer.state), len(trace), "
    found = dict(notebook.run(look + "optimizer.param_groups[0]['params'][0] is model.weight]"))
    assert found[0][1:] == [2, 1, True]
    assert found[1] == found[2] == found[0]
    assert names["model"].weight.sum().item() != found[0][0]
    # a list has no way to be changed in place: the name now means what the ranks have
    assert isinstance(names["trace"], Composite)
    assert names["trace"].gather() == [[1]] * 3
    assert names["trace"].previous == []
