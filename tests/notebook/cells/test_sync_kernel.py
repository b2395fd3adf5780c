"""A rank is replaced, in a notebook: what is said of its values, and how it gets them again."""

from __future__ import annotations

import re

import pytest

from tests.notebook.kernel import Kernel

TRAINED = """%%spmd
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
STEP = """%%spmd
optimizer.zero_grad()
loss = model(torch.full((4, 2), rank + 1.0)).sum()
loss.backward()
optimizer.step()
"""
KILLED = """import os, signal, time, gpupool
pool = gpupool.current_pool()
lost = pool.status().pids[1]
os.kill(lost, signal.SIGKILL)
while pool.status().pids.get(1) in (lost, None): time.sleep(0.01)
pool.restart([1])"""


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    """A kernel whose pool has trained for one step and then lost rank 1."""
    for code in ("%load_ext gpupool\n%gpupool start -n 2 --cpu", TRAINED, STEP, KILLED):
        cell = clean_kernel.run(code)
        assert cell.status == "ok", cell.error_text
    return clean_kernel


@pytest.mark.long
def test_the_table_and_the_errors_say_what_is_lost_until_it_is_copied(kernel: Kernel) -> None:
    lost = "lost with rank 1, which was killed by SIGKILL"
    shown = kernel.run("optimizer")
    assert shown.text.splitlines()[-1] == f"[1] no value  {lost}"
    assert lost in shown.html
    for code in ("optimizer[1]", STEP):
        error = kernel.run(code).error_text
        assert f"optimizer was {lost}; pool.sync_from(0, 'optimizer') copies it" in error
    done = kernel.run("%gpupool sync 0 model optimizer")
    assert done.text == "Rank 1 now has model, optimizer of rank 0."
    assert "no value" not in kernel.run("optimizer").text
    assert kernel.run(STEP).status == "ok"
    weights = kernel.run("[w.tolist() for w in model.module.weight]").text
    assert re.fullmatch(r"\[(\[\[.*\]\]),\s+\1\]", weights), weights


def test_a_wrong_line_says_what_is_wrong(kernel: Kernel) -> None:
    assert "give the source rank and the variables" in kernel.run("%gpupool sync 0").error_text
    assert "has no variable 'nosuch'" in kernel.run("%gpupool sync 0 nosuch").error_text
