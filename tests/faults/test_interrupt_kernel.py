"""Jupyter's stop button, pressed at any moment: the cell ends and the next one works.

One kernel for all of it. After each case a cell has to find its group and its variables.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest

from tests.notebook.kernel import Cell, Kernel
from tests.support.processes import reach, reached, until
from tests.support.raising import frames_of_ours

START = "%load_ext gpupool\n%gpupool start --cpu -n 2"
NEXT = "%%spmd\nones = torch.ones(1)\ndist.all_reduce(ones)\n(kept, ones.item())"
ENDED_S = 40.0  # it is one second on idle cores; that no rank was replaced, `kept` shows

CODES = {
    "busy-loop": "while True:\n    pass",
    "all-reduce": "import time\nif rank == 0:\n    time.sleep(60)\ndist.all_reduce(torch.ones(1))",
    "process": "import subprocess\nsubprocess.run(['sleep', '60'])",
}
TRAIN = """
import time, torch, gpupool
class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 2)
    def forward(self, x):
        time.sleep({step_s})
        return self.inner(x)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
run = gpupool.train(Slow(), data, options=gpupool.TrainingOptions(epochs=1000), wait=False)
while run.history.status == "starting":
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    assert clean_kernel.run(START).status == "ok"
    clean_kernel.run("%%spmd\nkept = rank + 10")
    return clean_kernel


def press(kernel: Kernel, code: str, *moments: float) -> Cell:
    """A cell that the stop button ends, seconds after it has begun (on the ranks, if theirs)."""
    begun = Path(kernel.folder, uuid4().hex)
    head, _, body = code.partition("\n")
    is_of_ranks = head.startswith("%%spmd")
    has_begun = (lambda: reached(begun, 0, 1)) if is_of_ranks else begun.exists
    code = f"{head}\n{reach(begun)}\n{body}" if is_of_ranks else f"{touch(begun)}\n{code}"
    over, pressed_at = threading.Event(), list[float]()

    def push() -> None:
        until(has_begun, 20.0, "its beginning")
        began = time.monotonic()
        for moment in moments:
            if over.wait(max(0.0, began + moment - time.monotonic())):
                return
            pressed_at.append(time.monotonic())
            os.killpg(kernel.manager.provisioner.pgid, signal.SIGINT)  # type: ignore[union-attr]

    finger = threading.Thread(target=push)
    finger.start()
    cell = kernel.run(code)
    ended = time.monotonic()
    over.set()
    finger.join()
    assert ended < pressed_at[0] + ENDED_S
    return cell


def touch(path: Path) -> str:
    """A line of the notebook's."""
    return f"open({str(path)!r}, 'w').close()"


def assert_short(cell: Cell, *words: str) -> None:
    """One error, of an interrupt, and nothing of ours in it."""
    text = cell.error_text
    assert "KeyboardInterrupt" in text
    assert all(word in text for word in words)
    assert not frames_of_ours(text)
    assert "ipyparallel" not in text
    assert len(text.splitlines()) <= 2


def assert_next_cell_works(kernel: Kernel) -> None:
    cell = kernel.run(NEXT)
    assert cell.text == "[0] (10, 2.0)\n[1] (11, 2.0)"


# ---- a cell ----------------------------------------------------------------------------------


# (1.0,) alone of sleep and barrier: tests/notebook/magics/test_magics_kernel.py
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_it_ends_a_cell_whatever_that_does(kernel: Kernel, code: str) -> None:
    cell = press(kernel, f"%%spmd\n{code}", 0.5)
    assert [error["ename"] for error in cell.errors] == ["SpmdError"]
    assert_short(cell, "SpmdError: ")
    assert_next_cell_works(kernel)


def test_it_ends_a_cell_of_the_background_that_is_waited_for(kernel: Kernel) -> None:
    kernel.run("%%spmd --nowait -o handle\nimport time\ntime.sleep(60)")
    # All while it runs: one that meets ipykernel between a cell and its reply costs it the reply.
    assert_short(press(kernel, "await handle", 0.5, 0.55, 0.6), "SpmdError: ")
    assert_next_cell_works(kernel)


# ---- a training ------------------------------------------------------------------------------


@pytest.mark.long
def test_it_ends_a_training_after_the_step_and_a_double_press_is_one(kernel: Kernel) -> None:
    kernel.run(TRAIN.format(step_s=0.1))
    assert press(kernel, "run.result().stopped_by", 0.5, 0.6).text.endswith("'user'")
    assert_next_cell_works(kernel)


# ---- the pool --------------------------------------------------------------------------------


def test_it_does_not_stop_a_stop(kernel: Kernel) -> None:
    engines = "[*__import__('gpupool').current_pool().status().pids.values()]"
    pids = kernel.run(engines).text
    stopped = press(kernel, "%gpupool stop", 0.05, 0.1, 0.15)
    if "Pool stopped." not in stopped.text:  # pressed before it had begun: nothing has happened
        assert kernel.run(engines).text == pids
        stopped = kernel.run("%gpupool stop")
    assert stopped.text == "Pool stopped."
    assert stopped.errors == []
    left = kernel.run(f"import psutil\n[pid for pid in {pids} if psutil.pid_exists(pid)]")
    assert left.text == "[]"
    assert kernel.run("%gpupool start --cpu -n 2").status == "ok"
    kernel.run("%%spmd\nkept = rank + 10")
    assert_next_cell_works(kernel)
