"""Data sets of the notebook are read by processes, lambdas and all; errors name its lines."""

from __future__ import annotations

import pytest

from tests.notebook.kernel import Kernel

SETUP = """%load_ext gpupool
%gpupool start --cpu -n 2
import os, random, time, numpy as np, torch, gpupool
from gpupool import train
class Own:
    def __init__(self, transform, bad=-1):
        self.transform, self.bad, self.table = transform, bad, np.ones((1000, 500))
    def __len__(self):
        return 96
    def __getitem__(self, index):
        until = time.thread_time() + 0.004
        while time.thread_time() < until:
            pass
        if index == self.bad and "reads" in open("/proc/self/comm").read():
            raise ValueError(f"no sample {index}")
        return self.transform(self.table[index, :4]), index % 2
def noisy(row):
    return torch.tensor(row + np.random.rand() + random.random(), dtype=torch.float32)
scale = 2.0
own = lambda bad=-1: Own(lambda row: scale * noisy(row), bad)
def run(epochs, bad=-1, **more):
    torch.manual_seed(0)
    return train(torch.nn.Linear(4, 2), own(bad), epochs=epochs, batch_size=24, **more)"""
# The agent is the parent of the ranks, and of what they leave; the kernel kills in its own time.
ENDED = """import psutil
agent = psutil.Process(gpupool.current_pool().status().pids[0]).parent()
deadline = time.monotonic() + 30
while any(one.name() == "gpupool:reads" for one in agent.children(recursive=True)):
    assert time.monotonic() < deadline
    time.sleep(0.05)
[]"""


# 40 s of CPU, as each rank's server imports torch; the parts are in tests/data/loading
@pytest.mark.long
def test_a_data_set_of_the_notebook_is_read_by_processes(clean_kernel: Kernel) -> None:
    clean_kernel.run(SETUP)
    # as many epochs as it takes until the processes are there
    shown = clean_kernel.run(
        "epochs = 8\n"
        "while 'processes' not in (done := run(epochs, workers=2)).history.reads.read_by:\n"
        "    epochs *= 2\n"
        "print(done.summary())"
    )
    assert "read by 2 processes" in shown.text
    same = clean_kernel.run("print(run(2, workers=0).history.loss == done.history.loss[:8])")
    assert same.text.strip().endswith("True")
    assert clean_kernel.run(ENDED).text.strip().endswith("[]")
    failed = clean_kernel.run("run(1000, bad=40, workers=2)")
    assert "no sample 40" in failed.text
    assert "Cell In[2], line 15" in failed.text
    assert "worker" not in failed.text.replace("workers=2", "")
    assert clean_kernel.run(ENDED).text.strip().endswith("[]")
