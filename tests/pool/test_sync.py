"""State of one rank for the others, and what is said of values that went with a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import gpupool
from gpupool import Composite, OptionsError, Pool, PoolError, SpmdError
from gpupool.core.parcels import namespace
from gpupool.notebook.composite_view import composite_html, composite_text
from gpupool.notebook.spmd_view import QuietView
from gpupool.pool import session
from gpupool.spmd.cell import Notebook, SpmdRun
from tests.pool.processes import engine_pid, until


@pytest.fixture
def pool3() -> Pool:
    """Three CPU ranks, the same from test to test."""
    pool = session.find()
    if pool is None or pool.status().state != "idle" or pool.world_size != 3:
        session.stop()
        pool = gpupool.start(n=3, device="cpu")
    return pool


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
    return SpmdRun(pool, source, pool.select_ranks(ranks), QuietView(), notebook=at).result()


def kill(pool: Pool, rank: int) -> None:
    """End a rank's process and put a new one in its place."""
    os.kill(engine_pid(pool, rank), signal.SIGKILL)
    until(lambda: pool.status().state != "idle", 5.0)
    pool.restart([rank])


MODEL = """
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    def forward(self, x):
        return self.layers(x)

torch.manual_seed(0)
net = Net().double()
model = DDP(net, {options})
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


@pytest.mark.parametrize(
    "options", ["", "static_graph=True", "gradient_as_bucket_view=True, bucket_cap_mb=0.0005"]
)
def test_training_goes_on_after_a_restart_as_if_nothing_had_been(
    pool3: Pool, options: str
) -> None:
    pool3.run(MODEL.replace("{options}", options) + STEPS + STEPS)
    expected = [flat(pool3.run(END)[rank]) for rank in range(3)]
    pool3.run(MODEL.replace("{options}", options) + STEPS)
    before = pool3.run("losses")
    pool3.restart([1])
    pool3.run("import torch.nn as nn", ranks=[1])
    pool3.sync_from(0, "net", "model", "optimizer", "scheduler", "step", "losses")
    pool3.run("losses[:] = mine", ranks=[1]) if False else None
    pool3.run(STEPS, timeout_s=60)
    for rank in range(3):
        found = flat(pool3.run(END)[rank])
        own = before[rank]
        assert found[10:] == pytest.approx(expected[rank][10:], abs=1e-12)
        assert found[5:10] == pytest.approx(expected[rank][5:10], abs=1e-12), own
