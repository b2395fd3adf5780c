"""State of one rank for the others, and what is said of values that went with a rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpupool import Composite, OptionsError, Pool, PoolError, SpmdError
from gpupool.core.wire.pickles import namespace
from gpupool.core.wire.requests import Interrupt
from gpupool.notebook.cells.views import QuietView
from gpupool.notebook.composites import composite_html, composite_text
from gpupool.spmd.cell import Notebook, SpmdRun
from tests.support.processes import kill as kill_ranks
from tests.support.processes import reach, reached, until
from tests.support.raising import raises


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """The notebook's names, as they were before when the test is over."""
    space = namespace()
    before = dict(space)
    yield space
    space.clear()
    space.update(before)


def cell(pool: Pool, source: str, ranks: str = "all") -> Any:
    """Run a cell as `%%spmd` does, with the notebook's names."""
    at = Notebook(namespace(), lambda text: text)
    return SpmdRun(
        pool, source, pool.select_ranks(ranks), QuietView("everything"), notebook=at
    ).result()


def kill(pool: Pool, rank: int) -> None:
    """End a rank's process and put a new one in its place."""
    kill_ranks(pool, rank)
    pool.restart([rank])


MODEL = """
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # no bias before the norm: its gradient is noise, which Adam would make large
        hidden = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU()
        self.layers = nn.Sequential(*hidden, nn.Linear(16, 1))
    def forward(self, x):
        return self.layers(x)

torch.manual_seed(0)
net = Net().double()
model = DDP(net, static_graph=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
step, losses = 0, []
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
    losses.append(loss.item())
"""
END = "[losses, optimizer.param_groups[0]['lr'], *(v.tolist() for v in net.state_dict().values())]"


def flat(value: Any) -> list[float]:
    return [n for part in value for n in flat(part)] if isinstance(value, list) else [value]


def test_training_goes_on_after_a_restart_as_if_nothing_had_been(pool3: Pool) -> None:
    pool3.run(MODEL + STEPS + STEPS)
    expected = [flat(value) for value in pool3.run(END).values()]
    pool3.run(MODEL + STEPS)
    pool3.restart([1])
    pool3.sync_from(0, "net", "model", "optimizer", "scheduler", "step")
    pool3.run("losses = []")
    pool3.run(STEPS, timeout_s=60)
    found = [flat(value) for value in pool3.run(END).values()]
    for rank in range(3):
        assert found[rank][:5] == pytest.approx(expected[rank][5:10], abs=1e-12)
        assert found[rank][5:] == pytest.approx(expected[rank][10:], abs=1e-12)
    weights = pool3.run("[p.tolist() for p in net.parameters()]")
    assert weights[0] == weights[1] == weights[2]
    together = (
        "net is model.module and optimizer.param_groups[0]['params'][0] is net.layers[0].weight"
    )
    assert dict(pool3.run(f"{together} and scheduler.optimizer is optimizer")) == {
        0: True,
        1: True,
        2: True,
    }


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


def test_a_function_and_an_object_of_a_cell_arrive(pool3: Pool) -> None:
    source = (
        "class Meter:\n    def total(self): return self.n * factor\nm = Meter(); m.n = rank + 1"
    )
    pool3.run(source + "\nfactor = 10 ** rank\ndef double(x): return 2 * x * factor")
    pool3.restart([1])
    pool3.run("factor = 7", ranks=[1])
    pool3.sync_from(2, "m", "double")
    assert dict(pool3.run("(m.total(), double(1))")) == {0: (3, 2), 1: (21, 14), 2: (300, 200)}


def test_large_state_goes_in_pieces(pool3: Pool) -> None:
    pool3.run("big = torch.arange(40_000_000 // 2, dtype=torch.float64) + rank")  # 160 MB
    pool3.sync_from(2, "big")
    assert dict(pool3.run("(big[0].item(), big[-1].item(), big.sum().item())")) == dict.fromkeys(
        range(3), (2.0, 20_000_001.0, 20_000_000 * 19_999_999 / 2 + 4e7)
    )


@pytest.mark.parametrize(
    ("names", "rank", "at", "shown"),
    [
        (["one", "nosuch"], 0, "nosuch", ""),
        (["one", "locked"], 0, "locked", ("TypeError: ", "lock", " (locked['a'].lock)")),
        (["one", "stubborn"], 1, "the state", "ZeroDivisionError"),
        (["one", "shard"], 0, "shard", "TypeError: a DTensor "),
        (["part"], 0, "part", "RuntimeError: "),
    ],
)
def test_what_cannot_be_copied_changes_nothing(
    pool3: Pool, names: list[str], rank: int, at: str, shown: str | tuple[str, ...]
) -> None:
    pool3.run(REFUSED)
    with raises(PoolError, "not copied", at, ranks=(rank,), shown=shown):
        pool3.sync_from(0, *names)
    assert dict(pool3.run("one")) == {0: 0, 1: 1, 2: 2}
    assert pool3.status().state == "idle"


REFUSED = """
import threading
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
one = rank
class Holder: pass
locked = {"a": Holder()}
locked["a"].lock = threading.Lock()
class Stubborn:
    def __setstate__(self, state): 1 / (dist.get_rank() - 1)
stubborn = Stubborn(); stubborn.x = 1
mesh = init_device_mesh("cpu", (3,))
shard = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
pair = dist.new_group([0, 1])
part = DDP(torch.nn.Linear(1, 1), process_group=pair) if rank < 2 else None
"""


def test_what_is_asked_for_wrongly_is_refused(pool3: Pool) -> None:
    for arguments, kind, names, shown in [
        ((0,), "incomplete", [], ""),
        ((3, "x"), "range", ["source"], (" 3 ", " 0 to 2")),
        (("0", "x"), "range", ["source"], " '0' "),
    ]:
        with raises(OptionsError, kind, *names, shown=shown):
            pool3.sync_from(*arguments)  # type: ignore[arg-type]
    with raises(OptionsError, "no effect", "source"):
        pool3.sync_from(0, "x", ranks=[0, 1])
    with raises(PoolError, "reserved", "device"):
        pool3.sync_from(0, "device")
    with raises(PoolError, "no name", "a.b"):
        pool3.sync_from(0, "a.b")


def test_an_error_of_one_rank_meanwhile_changes_nothing(pool3: Pool, tmp_path: Path) -> None:
    """Rank 1 is interrupted in its unpickling; the others wait for it in the collective."""
    begun = tmp_path / "rank"
    source = f"import time\nclass Slow:\n    def __setstate__(self, s):\n        {reach(begun)}\n"
    pool3.run(source + "        if dist.get_rank() == 1: time.sleep(60)\ns = Slow(); s.x = rank")

    def interrupt_rank_1() -> None:
        until(lambda: reached(begun, 1), 10.0)
        pool3.ask(Interrupt(), [1])

    thread = threading.Thread(target=interrupt_rank_1)
    thread.start()
    with pytest.raises((SpmdError, PoolError), match="KeyboardInterrupt"):
        pool3.sync_from(0, "s")
    thread.join()
    assert dict(pool3.run("s.x")) == {0: 0, 1: 1, 2: 2}
    assert pool3.run("x = torch.ones(1); dist.all_reduce(x); x.item()")[1] == 3.0


# ---- the notebook's handles ------------------------------------------------------------------


def test_a_model_of_the_notebook_that_ranks_have_trained_is_copied_to_the_new_one(
    pool3: Pool, names: dict[str, Any]
) -> None:
    """The new rank would get the notebook's own, untrained, with the next cell."""
    names["model"] = torch.nn.Linear(2, 1)
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1, momentum=0.9)
    names["trace"] = []
    train = "optimizer.zero_grad(); model(torch.ones(1, 2)).sum().backward(); optimizer.step()"
    cell(pool3, f"{train}\ntrace.append(1)")
    pool3.restart([1])
    pool3.sync_from(0, "model", "optimizer", "trace")
    assert isinstance(names["model"], torch.nn.Linear)
    look = "[model.weight.sum().item(), len(optimizer.state), len(trace), "
    found = dict(cell(pool3, look + "optimizer.param_groups[0]['params'][0] is model.weight]"))
    assert found[0][1:] == [2, 1, True]
    assert found[1] == found[2] == found[0]
    assert names["model"].weight.sum().item() != found[0][0]
    # a list has no way to be changed in place: the name now means what the ranks have
    assert isinstance(names["trace"], Composite)
    assert names["trace"].gather() == [[1]] * 3
    assert names["trace"].previous == []


def test_handles_stay_good_and_their_facts_are_asked_for_again(
    pool3: Pool, names: dict[str, Any]
) -> None:
    cell(pool3, "x = torch.zeros(rank + 1)")
    x, shape = names["x"], names["x"].shape
    assert [x.info[r].shape for r in range(3)] == [(1,), (2,), (3,)]
    pool3.sync_from(2, "x", ranks=[0])
    assert names["x"] is x
    assert [x.info[r].shape for r in range(3)] == [(3,), (2,), (3,)]
    assert [tuple(s) for s in shape.gather()] == [(3,), (2,), (3,)]
    kill(pool3, 1)
    assert sorted(x.info) == sorted(shape.info) == [0, 2]
    pool3.sync_from(0, "x")
    assert x.info[1].shape == (3,)
    assert cell(pool3, "x.sum().item()")[1] == 0.0


@pytest.mark.long
def test_a_value_that_went_with_its_rank_says_so(pool3: Pool, names: dict[str, Any]) -> None:
    cell(pool3, "x = [rank] * 2\nif rank == 0: only = 1")
    x = names["x"]
    kill(pool3, 1)
    shown = ("killed by SIGKILL; ", "pool.sync_from(0, 'x', ranks=[1])")
    for ask in (lambda: x[1], x.gather, lambda: list(x), lambda: pool3["x"][1]):
        with raises(PoolError, "lost", "x", ranks=(1,), shown=shown):
            ask()
    assert x[2] == [2, 2]
    lines = composite_text(x).splitlines()
    assert lines[-1].startswith("[1] no value  lost with rank 1, which was killed by SIGKILL")
    assert "lost with rank 1" in composite_html(x)
    assert "lost" not in composite_text(names["only"])
    with raises(PoolError, "unknown", "only", ranks=(1,)):
        names["only"][1]
    with raises(SpmdError, "lost", "x", ranks=(1,), shown=shown, ename="NameError") as caught:
        cell(pool3, "x[0]")
    assert " rank 1, " in caught.value.first.evalue
    with raises(SpmdError, "", ename="NameError") as caught:
        cell(pool3, "nosuch")
    assert {error.kind for error in caught.value.errors.values()} == {""}
    pool3.restart([2])
    assert "which was restarted" in composite_text(x)
    pool3.sync_from(0, "x", ranks=[1])
    assert x[1] == [0, 0]
    with raises(PoolError, "lost", "x", ranks=(2,), shown="restarted"):
        x[2]
    cell(pool3, "x = 1")
    assert "lost" not in composite_text(names["x"])
