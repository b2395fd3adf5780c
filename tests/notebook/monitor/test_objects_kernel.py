"""What a pool, a run and what it leaves look like at the end of a cell, in a real kernel."""

from __future__ import annotations

import re

import pytest

from tests.notebook.kernel import Cell, Kernel, without_progress

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
DATA = """
import gpupool, threading, torch
from torch import nn
from torch.utils.data import Dataset
pool = gpupool.current_pool()
gate = "{folder}/gate"

class Squares(Dataset):
    classes = ["dark", "bright"]
    def __init__(self, num, gate=None):
        self.num, self.gate = num, gate
    def __len__(self):
        return self.num
    def __getitem__(self, index):
        import os, time
        while self.gate and index > 4 and not os.path.exists(self.gate):
            time.sleep(0.01)
        return torch.full((1, 8, 8), index % 7 / 7), int(index % 7 > 3)

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
run = gpupool.train(model, Squares(40, gate), wait=False, validation=Squares(20), epochs=2,
                    batch_size=4, lr=0.02, workers=1, shuffle="never")
"""


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    assert clean_kernel.run("%load_ext gpupool\n%gpupool start -n 2 --cpu").status == "ok"
    assert clean_kernel.run(DATA.format(folder=clean_kernel.folder)).status == "ok"
    return clean_kernel


def only(cell: Cell) -> str:
    """The HTML of a cell that shows one thing."""
    assert cell.status == "ok"
    (output,) = without_progress(cell.outputs)
    return str(output["data"]["text/html"])


def test_a_run_has_a_second_live_view_and_all_become_still(kernel: Kernel) -> None:
    line = kernel.run("print(repr(run), run.history.line() in repr(run))").text
    assert line.startswith("TrainingRun(")
    assert line.endswith("True")
    live = kernel.run("run")
    (shown,) = live.outputs
    assert WIDGET_VIEW in shown["data"]
    ended = kernel.run("open(gate, 'w').close(); result = run.result()")
    places = {
        message["transient"]["display_id"]
        for _, kind, message in ended.messages
        if kind == "update_display_data" and "Finished" in message["data"].get("text/plain", "")
    }
    assert shown["transient"]["display_id"] in places
    assert len(places) == 2  # the one of `train` too
    assert "Finished: 2 epochs" in only(kernel.run("run"))


def test_a_pool_shows_its_bar(kernel: Kernel) -> None:
    bar, started = only(kernel.run("pool")), only(kernel.run("%gpupool status"))
    assert 'class="gpupool-bar' in bar
    assert bar == started
    assert kernel.run("print(repr(pool))").text == "Pool(2 ranks, gloo, idle)"


def test_a_result_shows_its_options_best_and_worst(kernel: Kernel) -> None:
    page = only(kernel.run("result"))
    options = "epochs=2, lr=0.02, batch_size=4"
    assert all(option in page for option in options.split(", "))
    best = kernel.run("result.best")
    assert re.search(r"after step \d+, epoch \d", only(best))
    assert best.text.startswith("Validation after step ")
    assert "accuracy" in best.text
    history = kernel.run("result.history")
    assert "Finished: 2 epochs" in only(history)
    assert history.text.startswith("Finished: 2 epochs in ")
    line = kernel.run("print([result.history])").text
    assert line.startswith("[TrainingHistory(finished  epoch 2/2  step 20/20  ")
    assert len(line) < 200
    worst = kernel.run("result.worst(3)")
    assert only(worst).count("<img") == 3
    assert worst.text.count("\n") == 3
    assert "2 trainings" in only(kernel.run("gpupool.compare(result, run)"))
