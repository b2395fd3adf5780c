"""State of one rank for the others, and what is said of values that went with a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpupool import Composite, Pool, PoolError
from gpupool.core.wire.pickles import namespace
from gpupool.notebook.cells.line_view import QuietView
from gpupool.spmd.cell import Notebook, SpmdRun
from tests.support.raising import raises


def cell(pool: Pool, source: str, ranks: str = "all") -> Any:
    """Run a cell as `%%spmd` does, with the notebook's names."""
    at = Notebook(namespace(), lambda text: text)
    return SpmdRun(pool, source, pool.select(ranks), QuietView(), notebook=at).result()


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


def test_a_model_of_the_notebook_that_ranks_have_trained_is_copied_to_the_new_one(
    pool3: Pool, names: dict[str, Any]
) -> None:
    """The new rank would get the notebook's own, untrained, with the next cell."""
    names["model"] = torch.nn.Linear(2, 1)
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1, momentum=0.9)
    names["trace"] = []
    train = "optimizer.zero_grad(); model(torch.ones(1, 2)).sum().backward(); optimizer.step()"
    cell(pool3, f"{train}\ntrace.append(1)\nx = torch.zeros(rank + 1)")
    x = names["x"]
    pool3.restart([1])
    pool3.sync_from(0, "model", "optimizer", "trace")
    assert sorted(x.info) == [0, 2]
    pool3.sync_from(2, "x", ranks=[1])
    assert (names["x"] is x, x.info[1].shape) == (True, (3,))
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
