"""A loop of one's own in a `%%spmd` cell, as a user has it: real kernel, real ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebook.kernel import Cell, Kernel, draws
from tests.notebook.pages import Page
from tests.support.waits import until_there

DATA = """
import gpupool, torch
from torch import nn
from torch.utils.data import TensorDataset
generator = torch.Generator().manual_seed(0)
points = torch.randn(50, 8, generator=generator, dtype=torch.float64)
dataset = TensorDataset(points, points[:, :3].argmax(1))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
"""

TRAIN = """
options = gpupool.TrainingOptions(batch_size=12, lr=0.1, epochs=3)
expected = gpupool.train(model, dataset, "cross_entropy", options).history.loss
"""

OWN = """%%spmd
import gpupool
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
losses, step = [], 0
with gpupool.monitor(["loss"], num_steps=15) as monitor:
    for epoch in range(1, 4):
        for batch in gpupool.shard_batches(dataset, 12, epoch=epoch):
            mean_loss = cross_entropy(parallel(batch.inputs), batch.targets)
            loss = gpupool.weighted_loss(mean_loss, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            monitor.record(step, weight=batch.num_here, loss=mean_loss)
            whole = loss.detach() / world_size
            dist.all_reduce(whole)
            losses.append(whole.item())
"""

ASKS = "        if monitor.stop:\n            break\nstep"
ENDLESS = """%%spmd
import time
import gpupool
with gpupool.monitor(["loss"], title="Endless") as monitor:
    for step in range(1, 10_000):
        time.sleep(0.02 * (rank + 1))
        monitor.record(step, loss=torch.tensor(float(rank)))
"""


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    assert clean_kernel.run("%load_ext gpupool\n%gpupool start -n 2 --cpu").status == "ok"
    return clean_kernel


ASKED_AGAIN = draws("interrupts it at once")


def has_button(cell: Cell) -> bool:
    """Whether the monitor has a Stop button: so the loop has asked whether to stop."""
    states = [content["data"] for _, kind, content in cell.messages if kind.startswith("comm_")]
    views = [data.get("state", data.get("content", {})).get("view", {}) for data in states]
    return [view["stop_label"] for view in views if "stop_label" in view][-1:] == ["Stop"]


def test_an_own_loop_has_the_losses_of_train_and_is_shown(kernel: Kernel) -> None:
    assert kernel.run(DATA).status == "ok"
    assert kernel.run(TRAIN).status == "ok"
    cell = kernel.run(OWN)
    assert cell.status == "ok", cell.error_text
    assert cell.html.count("<img") == 1
    assert "finished" in cell.html
    difference = "max(abs(a - b) for a, b in zip(losses[0], expected, strict=True))"
    assert float(kernel.run(difference).text) < 1e-12
    last = float(kernel.run("f'{expected[-1]:.4g}'").text.strip("'"))
    assert f"step 15 of 15, loss {last:.4g}" in cell.text


def test_the_stop_button_ends_a_loop_that_asks_at_the_same_step_on_all_ranks(
    kernel: Kernel,
) -> None:
    cell = kernel.run(ENDLESS + ASKS, meanwhile=[(has_button, kernel.press_stop)])
    assert cell.status == "ok", cell.error_text
    assert "Endless: stopped, step " in cell.text
    assert kernel.run("_[0] == _[1] > 1").text == "True"


def test_stop_in_the_monitor_ends_the_loop_while_the_cell_blocks(
    kernel: Kernel, tmp_path: Path
) -> None:
    page, go = Page(kernel, "stop_label", "gpupool-training", subshell=True), tmp_path / "go"
    held = f"        if monitor.stop:\n{until_there(go, margin=' ' * 12)}\n            break\nstep"
    page.run(ENDLESS + held, lambda page: page.view.get("stop_label") == "Stop")
    assert page.status == "running"
    for _ in range(2):  # a second press means the same, and interrupts nothing
        page.send("stop")
    page.follow(lambda page: page.status == "stopping")  # the acknowledgement
    go.touch()
    page.follow(lambda page: "Endless: stopped" in page.html)
    assert kernel.run("_[0] == _[1] > 1").text == "True"


def test_the_stop_button_interrupts_a_loop_that_does_not_ask(kernel: Kernel) -> None:
    cell = kernel.run(ENDLESS, meanwhile=[(draws("Endless: step "), kernel.press_stop)])
    assert cell.status == "error"
    assert "KeyboardInterrupt" in cell.error_text
    assert "ended by an error" in cell.html
    assert not ASKED_AGAIN(cell)


def test_a_monitor_that_nobody_closes_ends_with_its_cell(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%spmd\nmonitor = gpupool.monitor(['a'], title='Left')\nmonitor.record(1, a=2.0 * rank)"
    )
    assert re.fullmatch(r"Left: step 1, a 1, \d+\.\d s, ended", cell.text)
