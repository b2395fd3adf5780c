"""A rank is replaced, in a notebook: what is said of its values, and how it gets them again."""

from __future__ import annotations

import re

import pytest

from tests.notebook.kernel import Cell, Kernel

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
SECRET = """import os
os.environ["GPUPOOL_TEST_TOKEN"] = "tok-5ecret-5ecret"
%gpupool env GPUPOOL_TEST_TOKEN
x = 1
%spmd x"""
KILLED = """import os, signal, time, gpupool
pool = gpupool.current_pool()
lost = pool.status().pids[1]
os.kill(lost, signal.SIGKILL)
while pool.status().pids.get(1) in (lost, None): time.sleep(0.01)
pool.restart([1])"""


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    """A kernel whose pool has trained for one step and then lost rank 1."""
    for code in ("%load_ext gpupool\n%gpupool start -n 2 --cpu", TRAINED, STEP, SECRET, KILLED):
        cell = clean_kernel.run(code)
        assert cell.status == "ok", cell.error_text
    return clean_kernel


def last_line(cell: Cell) -> str:
    return cell.text.splitlines()[-1]


@pytest.mark.long
def test_the_table_and_the_errors_say_what_is_lost_until_it_is_copied(kernel: Kernel) -> None:
    lost = "lost with rank 1, which was killed by SIGKILL"
    shown = kernel.run("optimizer")
    assert last_line(shown) == f"[1] no value  {lost}"
    assert lost in shown.html
    way_on = "pool.sync_from(0, 'optimizer', ranks=[1]) copies it."
    error = kernel.run("optimizer[1]")
    assert error.error_text == f"PoolError: optimizer of rank 1 was {lost}; {way_on}"
    error = kernel.run(STEP)
    assert f"name 'optimizer' is not defined (optimizer was {lost}; {way_on[:-1]})" in (
        error.error_text
    )
    done = kernel.run("%gpupool sync 0 model optimizer")
    assert done.text == "Rank 1 now has model, optimizer of rank 0."
    assert "no value" not in kernel.run("optimizer").text
    assert kernel.run(STEP).status == "ok"
    weights = kernel.run("[w.tolist() for w in model.module.weight]").text
    assert re.fullmatch(r"\[(\[\[.*\]\]),\s+\1\]", weights), weights


@pytest.mark.long
def test_a_new_rank_has_the_secrets_and_shows_none(kernel: Kernel) -> None:
    code = "import os\ntoken = os.environ['GPUPOOL_TEST_TOKEN']\nprint(token)\nlen(token)"
    cell = kernel.run(f"%%spmd -t 1\n{code}")
    assert "17" in cell.text
    for shown in (cell, kernel.run("%gpupool env"), kernel.run("token")):
        assert "5ecret" not in shown.text + shown.html
    assert "GPUPOOL_TEST_TOKEN" in kernel.run("%gpupool env").text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "give the source rank and the variables to copy"),
        ("0", "give the source rank and the variables to copy"),
        ("model 0", "argument RANK: invalid int value: 'model'"),
        ("2 model", "2 is no rank; the ranks are 0 to 1."),
        ("0 nosuch", "On rank 0, nosuch: it has no such variable."),
        ("0 model -t 0", "rank 0 has it already"),
    ],
)
def test_a_wrong_line_says_what_is_wrong(kernel: Kernel, line: str, said: str) -> None:
    assert said in kernel.run(f"%gpupool sync {line}").error_text
