"""No cell takes away what the next one needs: its names, its output, its interrupts, its reply."""

from __future__ import annotations

import pytest
import torch

import gpupool
from gpupool import Pool, SpmdError
from tests.support.raising import raises

ACTS = {
    "reset": "%reset -f",
    "none": "import sys; sys.stdout = sys.stderr = None",
    "close": "import sys; sys.stdout.close(); sys.stderr.close(); sys.stdout.buffer.close()",
    "signals": "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "default device": (
        "import torch as t; t.set_default_device('meta'); t.set_default_dtype(t.half)"
    ),
}
NEXT = """
import subprocess, sys
print("seen", rank)
print("said", rank, file=sys.stderr)
subprocess.run(["echo", "child"])
t = torch.ones(1, device=device, dtype=torch.float64)
dist.all_reduce(t)
[t.item(), world_size, local_rank, exit.__class__.__name__]
"""
TEE = """
import io, sys
class Logger:
    def __init__(self): self.terminal, self.log = sys.stdout, io.StringIO()
    def write(self, text): self.terminal.write(text); self.log.write(text)
    def flush(self): self.log.flush()
sys.stdout = Logger()
print("first")
"""
AGAIN = "import torch as t; t.set_default_device(None); t.set_default_dtype(t.float32)"


@pytest.mark.parametrize("act", ACTS)
def test_what_one_act_breaks_is_there_for_the_next_cell(pool2: Pool, act: str) -> None:
    pids = pool2.status().pids
    try:
        pool2.run(ACTS[act], timeout_s=60)
        result = pool2.run(NEXT, timeout_s=60)
        for rank in (0, 1):
            assert result[rank] == [2.0, 2, rank, "_Exit"]
            assert result.text(rank) == f"seen {rank}\nsaid {rank}\nchild\n"
        if act == "signals":  # a rank that is deaf would be lost
            with raises(SpmdError, " 0.2 s", ename="TimeoutError"):
                pool2.run("while True: pass", timeout_s=0.2)
        assert pool2.status().pids == pids
    finally:
        pool2.run(AGAIN)


def test_a_tee_that_works_stays_and_shows_each_cell_its_text(pool2: Pool) -> None:
    try:
        assert pool2.run(TEE).text(0) == "first\n"
        second = pool2.run("print('second')\nsys.stdout.log.getvalue()")
        assert second.text(1) == "second\n"
        assert second[1] == "first\nsecond\n"
    finally:
        pool2.run("sys.stdout = sys.stdout.terminal")


def test_a_name_that_a_cell_binds_itself_stays_what_it_is(pool2: Pool) -> None:
    try:
        pool2.run("%%time\ndist = [1]\nfrom os import path as device")
        assert pool2.run("dist, device.__name__")[0] == ([1], "posixpath")
    finally:
        pool2.run("del dist, device")
    assert pool2.run("dist.get_rank(), device.type")[1] == (1, "cpu")


def test_a_training_does_not_mind_the_default_device_of_the_cells(pool2: Pool) -> None:
    data = torch.utils.data.TensorDataset(torch.rand(8, 4), torch.arange(8) % 2)
    options = gpupool.TrainingOptions(epochs=1, batch_size=4, progress="none")
    pool2.run("torch.set_default_device('meta')")
    try:
        gpupool.train(torch.nn.Linear(4, 2), data, validation=data, options=options)
        assert pool2.run("torch.ones(1).device.type")[1] == "meta"
    finally:
        pool2.run(AGAIN)
