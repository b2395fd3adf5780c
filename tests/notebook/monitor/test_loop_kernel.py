"""A loop of one's own, a run and what it leaves, as a user has them: real kernel, real ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebook.kernel import Cell, Kernel, draws, without_progress
from tests.notebook.pages import Page
from tests.support.waits import until_there

OWN = """%%spmd
import gpupool
with gpupool.monitor(["loss"], num_steps=15) as monitor:
    for step in range(1, 16):
        monitor.record(step, weight=1 + rank, loss=torch.tensor(float(rank)))
"""

ENDLESS = """%%spmd
import time
import gpupool
with gpupool.monitor(["loss"], title="Endless") as monitor:
    for step in range(1, 10_000):
        time.sleep(0.02 * (rank + 1))
        monitor.record(step, loss=torch.tensor(float(rank)))
"""

RUN = """
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
    return clean_kernel


def test_a_loop_that_is_over_is_a_picture_and_a_line(kernel: Kernel) -> None:
    cell = kernel.run(OWN)
    assert cell.status == "ok", cell.error_text
    assert cell.html.count("<img") == 1
    assert "finished" in cell.html
    assert "step 15 of 15, loss 0.6667" in cell.text


def test_stop_in_the_monitor_ends_the_loop_while_the_cell_blocks(
    kernel: Kernel, tmp_path: Path
) -> None:
    page, go = Page(kernel, subshell=True), tmp_path / "go"
    held = f"        if monitor.stop:\n{until_there(go, margin=' ' * 12)}\n            break\nstep"
    page.run(ENDLESS + held, lambda page: ">Stop<" in page.parts.get("buttons", ""))
    assert "Endless" in page.parts["header"]
    for _ in range(2):  # a second press means the same, and interrupts nothing
        page.send("stop")
    page.follow(lambda page: "stopping" in page.parts["header"])  # the acknowledgement
    assert "disabled" in page.parts["buttons"]
    go.touch()
    page.follow(lambda page: "Endless: stopped" in page.html)
    assert kernel.run("_[0] == _[1] > 1").text == "True"


def test_the_stop_button_interrupts_a_loop_that_does_not_ask(kernel: Kernel) -> None:
    cell = kernel.run(ENDLESS, meanwhile=[(draws("Endless: step "), kernel.press_stop)])
    assert cell.status == "error"
    assert "KeyboardInterrupt" in cell.error_text
    assert "ended by an error" in cell.html
    assert not draws("interrupts it at once")(cell)
    cell = kernel.run(
        "%%spmd\nmonitor = gpupool.monitor(['a'], title='Left')\nmonitor.record(1, a=2.0 * rank)"
    )
    assert re.fullmatch(r"Left: step 1, a 1, \d+\.\d s, ended", cell.text)  # with its cell


# ---- a run of `train`, and what it leaves


def only(cell: Cell) -> str:
    assert cell.status == "ok"
    (output,) = without_progress(cell.outputs)
    return str(output["data"]["text/html"])


def test_a_run_has_a_second_live_view_and_all_become_still(kernel: Kernel) -> None:
    assert kernel.run(RUN.format(folder=kernel.folder)).status == "ok"
    line = kernel.run("print(repr(run), run.history.line() in repr(run))").text
    assert line.startswith("TrainingRun(")
    assert line.endswith("True")
    live = kernel.run("run")
    (shown,) = live.outputs
    assert "data-live" in shown["data"]["text/html"]
    ended = kernel.run("open(gate, 'w').close(); result = run.result()")
    places = {
        message["transient"]["display_id"]
        for _, kind, message in ended.messages
        if kind == "update_display_data" and "Finished" in message["data"].get("text/plain", "")
    }
    assert shown["transient"]["display_id"] in places
    assert len(places) == 2  # the one of `train` too
    assert "Finished: 2 epochs" in only(kernel.run("run"))


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
