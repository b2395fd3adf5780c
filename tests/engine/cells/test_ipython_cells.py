"""Cells on the ranks are IPython: its magics, its help, its ways to leave; nothing waits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gpupool
from gpupool import Pool, SpmdError
from tests.notebook.kernel import plain
from tests.support.raising import frames_of_ours, raises, same_on

SUM = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"


@pytest.mark.parametrize(
    ("cell", "text", "value"),
    [
        ("%timeit -n 1 -r 1 pass", r"± .* per loop", None),
        ("%env GPUPOOL_TEST_X=1\nimport os; os.environ['GPUPOOL_TEST_X']", "env: GPUPOOL", "1"),
        ("%%bash\necho from bash", "from bash\n", None),
        ("%%capture held\nprint('hidden')", "^$", None),
        ("held.stdout", "^$", "hidden\n"),
        ("%load_ext autoreload\n%autoreload 2\n%autoreload 0", "^$", None),
        ("number = 41\nnumber?", r"Type: +int\nString form: 41\n", None),
        ("%debug", "`%gpupool debug RANK` opens the debugger where that rank failed last", None),
    ],
)
def test_a_cell_is_ipython(pool2: Pool, cell: str, text: str, value: object) -> None:
    result = pool2.run(cell, timeout_s=30)
    for rank in (0, 1):
        assert re.search(text, plain(result.text(rank)))
        assert result[rank] == value


def test_a_file_runs_in_the_names_of_the_cells(pool2: Pool, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("import sys\nfound = (__name__, sys.argv[1:])\nprint('ran')\n")
    result = pool2.run(f"%run {file} --lr 0.1\nfound")
    assert result[0] == ("__main__", ["--lr", "0.1"])
    assert result.text(1) == "ran\n"


FAILING = {
    "fails.py": "import sys\nx = 1\ndef f():\n    1 / 0\nf()\n",
    "exits.py": "import sys\nsys.exit(3)\n",
    "fails_on_one.py": (
        "import torch, torch.distributed as dist\n"
        "if dist.get_rank() == 1:\n    raise ValueError('one')\ndist.all_reduce(torch.ones(1))\n"
    ),
}


@pytest.fixture
def in_a_folder_of_scripts(pool2: Pool, tmp_path: Path) -> Iterator[None]:
    for name, text in FAILING.items():
        (tmp_path / name).write_text(text)
    before = pool2.run("%pwd")[0]
    pool2.run(f"%cd -q {tmp_path}")
    yield
    pool2.run(f"%cd -q {before}")


@pytest.mark.usefixtures("in_a_folder_of_scripts")
@pytest.mark.parametrize(
    ("cell", "message", "where"),
    [
        ("%run fails.py", "ZeroDivisionError", "fails.py, line 4"),
        ("%run exits.py", "SystemExit: 3", "exits.py, line 2"),
        ("%%time\n%run fails_on_one.py", "rank 1: ValueError: one", "fails_on_one.py, line 3"),
        ("%%capture\nif rank: 1 / 0\ndist.barrier()", "rank 1: ZeroDivision", "pool.run, line 2"),
        ("%%capture held\nx = (", "incomplete input", "pool.run"),
        ("%%capture\n%%time\n1 / 0", "ZeroDivisionError", "pool.run, line 3"),
        ("%%bash\nexit 3", "returned non-zero exit status 3", "pool.run, line 1"),
    ],
)
def test_what_a_magic_runs_fails_the_cell_and_frees_the_other_rank(
    pool2: Pool, cell: str, message: str, where: str
) -> None:
    with pytest.raises(SpmdError) as caught:
        pool2.run(cell, timeout_s=60)
    assert message in str(caught.value)
    assert where in str(caught.value)
    shown = plain(caught.value.first.traceback)
    assert not frames_of_ours(shown)
    assert "runpy" not in shown
    assert pool2.run(SUM)[0] == 2.0


def test_a_cell_may_end_early(pool2: Pool) -> None:
    pids = pool2.status().pids
    pool2.run("reached = 1\nif True:\n    exit()\nreached = 2")
    with pytest.raises(SpmdError, match="SystemExit: 3") as caught:
        pool2.run("quit(3)")  # an error, as in a shell
    assert not frames_of_ours(caught.value.first.traceback)
    assert dict(pool2.run("reached")) == {0: 1, 1: 1}
    assert pool2.status().pids == pids


@pytest.mark.parametrize("cell", ["input('name? ')", "import pdb; pdb.Pdb().set_trace()\n1"])
def test_what_would_wait_for_the_user_is_an_error_at_once(pool2: Pool, cell: str) -> None:
    with raises(SpmdError, ename="StdinNotImplementedError") as caught:
        pool2.run(cell, timeout_s=30)
    assert same_on(caught.value, 0, 1)


def test_a_launcher_says_what_to_call_instead(pool2: Pool) -> None:
    cell = (
        "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
        "def work(*_): pass\nelastic_launch(LaunchConfig(1, 1, nproc_per_node=2), work)()"
    )
    children = "import psutil; len(psutil.Process().children())"
    before = pool2.run(children)[0]
    with raises(SpmdError, "call work(rank, ...) instead") as caught:
        pool2.run(cell, timeout_s=60)
    assert not frames_of_ours(caught.value.first.traceback)
    assert pool2.run(children)[0] == before
    assert pool2.run(SUM)[0] == 2.0


def test_a_value_without_a_text_is_no_error(pool2: Pool) -> None:
    broken = "class Broken:\n    def __repr__(self): raise ValueError('no text')\nBroken()"
    result = pool2.run(broken)
    assert result.value_text(0) == "<Broken: its __repr__ raised ValueError>"
    assert plain(result.text(0)).endswith("ValueError: no text\n")  # as in any notebook


# ---- no cell takes away what the next one needs ------------------------------------------------

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
