"""No cell takes away what the next one needs: its names, its output, its interrupts, its reply."""

from __future__ import annotations

import textwrap

import pytest
import torch

import gpupool
from gpupool import Pool, SpmdError
from tests.support.raising import raises

_TEE = """
class Tee:
    def __init__(self, *logs): self.terminal, self.logs = sys.__stdout__, logs
    def write(self, text): return self.terminal.write(text)
"""

ACTS = {
    "star import": "from math import *",
    "reset": "%reset -f",
    "none": "import sys; sys.stdout = sys.stderr = None",
    "flush fails": f"import sys\n{_TEE}\nsys.stdout = Tee(); sys.stdout.flush = lambda: 1 / 0",
    "closed file": "import os, sys\nwith open(os.devnull, 'w') as f: sys.stdout = f",
    "close": "import sys; sys.stdout.close(); sys.stderr.close(); sys.stdout.buffer.close()",
    "signals": (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))"
    ),
    "folder": "import os, tempfile\nf = tempfile.mkdtemp(); os.chdir(f); os.rmdir(f)",
    "default device": (
        "import torch as t; t.set_default_device('meta'); t.set_default_dtype(t.half)"
    ),
    "warnings": "import warnings; warnings.simplefilter('error')",
    "environment": (
        "import builtins, os\nkept = getattr(builtins, 'kept_environment', {})\n"
        "builtins.kept_environment = {**kept, **os.environ}; os.environ.clear()"
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
# What torch and Python would keep for ever, also where it spoils nothing of the pool.
AGAIN = (
    "import builtins, os; os.environ.update(getattr(builtins, 'kept_environment', {}))\n"
    "import torch, warnings; warnings.resetwarnings(); warnings.simplefilter('ignore')\n"
    "torch.set_default_device(None); torch.set_default_dtype(torch.float32)"
)


def hears_interrupts(pool: Pool) -> None:
    """A cell is ended by the time limit, which interrupts it; a rank that is deaf would be lost."""
    pids = pool.status().pids
    with raises(SpmdError, " 0.2 s", ename="TimeoutError"):
        pool.run("while True: pass", timeout_s=0.2)
    assert pool.status().pids == pids


@pytest.mark.parametrize("act", ACTS)
def test_what_one_act_breaks_is_there_for_the_next_cell(pool2: Pool, act: str) -> None:
    pids = pool2.status().pids
    try:
        pool2.run(ACTS[act], timeout_s=60)
        result = pool2.run(NEXT, timeout_s=60)
        for rank in (0, 1):
            assert result[rank] == [2.0, 2, rank, "_Exit"]
            assert result.text(rank) == f"seen {rank}\nsaid {rank}\nchild\n"
        if act == "signals":
            hears_interrupts(pool2)
        assert pool2.status().pids == pids
    finally:
        pool2.run(AGAIN)


def test_a_tee_that_works_stays_and_shows_each_cell_its_text(pool2: Pool) -> None:
    tee = """
    import io, sys
    class Logger:
        def __init__(self): self.terminal, self.log = sys.stdout, io.StringIO()
        def write(self, text): self.terminal.write(text); self.log.write(text)
        def flush(self): self.log.flush()
    sys.stdout = Logger()
    print("first")
    """
    try:
        assert pool2.run(textwrap.dedent(tee)).text(0) == "first\n"
        second = pool2.run("print('second')\nsys.stdout.log.getvalue()")
        assert second.text(1) == "second\n"
        assert second[1] == "first\nsecond\n"
    finally:
        pool2.run("sys.stdout = sys.stdout.terminal")


def test_it_is_said_what_was_put_back(pool2: Pool) -> None:
    said = pool2.run("import sys\nwith open('/dev/null', 'w') as f: sys.stdout = f").text(0)
    assert said.startswith("sys.stdout could not be flushed (ValueError: ")


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
        own_loop = """
            torch.set_default_device("meta")
            data = torch.utils.data.TensorDataset(a, a)
            with gpupool.monitor(["loss"], num_steps=2) as monitor:
                for step, share in enumerate(gpupool.shard_batches(data, 4), 1):
                    monitor.record(step, weight=share.num_here, loss=share.inputs.mean())
            share.inputs.device.type, torch.ones(1).device.type
        """
        pool2.run("import gpupool; a = torch.full([8], 1.0 + rank, device='cpu')")
        assert pool2.run(textwrap.dedent(own_loop))[1] == ("cpu", "meta")
        pool2.sync_from(0, "a")
        assert pool2.run("a.mean().item()")[1] == 1.0
    finally:
        pool2.run(AGAIN)
