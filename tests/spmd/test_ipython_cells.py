"""Cells on the ranks are IPython: its magics, its help, its ways to leave; nothing waits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpupool import Pool, SpmdError
from tests.notebook.kernel import plain


@pytest.mark.parametrize(
    ("cell", "text", "value"),
    [
        ("%time x = 40 + 2\nx", r"CPU times: .*\nWall time: ", 42),
        ("%%time\nx = 43\nx", r"CPU times: .*\nWall time: ", 43),
        ("%timeit -n 1 -r 1 pass", r"± .* per loop", None),
        ("%env GPUPOOL_TEST_X=1\nimport os; os.environ['GPUPOOL_TEST_X']", "env: GPUPOOL", "1"),
        ("!echo from the shell", "from the shell\n", None),
        ("lines = !echo one; echo two\nlist(lines)", "", ["one", "two"]),
        ("%%bash\necho from bash", "from bash\n", None),
        ("%%capture held\nprint('hidden')", "^$", None),
        ("held.stdout", "^$", "hidden\n"),
        ("%load_ext autoreload\n%autoreload 2", "^$", None),
        ("number = 41\nnumber?", r"Type: +int\nString form: 41\n", None),
        ("def documented():\n    'what it does'\ndocumented??", "what it does", None),
        ("nosuchname?", "Object `nosuchname` not found", None),
        ("import asyncio\nawait asyncio.sleep(0)\n7", "^$", 7),
        ("%debug", "`%gpupool debug RANK` opens the debugger where that rank failed last", None),
        ("%pdb off", "turned OFF", None),
    ],
)
def test_a_cell_is_ipython(pool2: Pool, cell: str, text: str, value: object) -> None:
    result = pool2.run(cell, timeout_s=30)
    for rank in (0, 1):
        assert re.search(text, plain(result.text(rank)))
        assert result[rank] == value


def test_a_folder_is_changed_for_the_rank_alone(pool2: Pool, tmp_path: Path) -> None:
    before = pool2.run("%pwd")[0]
    pool2.run(f"%cd {tmp_path}", ranks=1)
    assert dict(pool2.run("%pwd")) == {0: before, 1: str(tmp_path)}
    pool2.run(f"%cd {before}")


def test_a_file_runs_in_the_names_of_the_cells(pool2: Pool, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("import sys\nfound = (__name__, sys.argv[1:])\nprint('ran')\n")
    result = pool2.run(f"%run {file} --lr 0.1\nfound")
    assert result[0] == ("__main__", ["--lr", "0.1"])
    assert result.text(1) == "ran\n"
    assert pool2.run("import sys; sys.argv")[0] == ["notebook"]


def test_a_figure_is_shown(pool2: Pool) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    cell = "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);"
    result = pool2.run(cell, timeout_s=60)
    for rank in (0, 1):
        assert "image/png" in result.outputs[rank].displays[-1]["data"]


@pytest.mark.parametrize("leave", ["sys.exit()", "sys.exit(0)", "raise SystemExit", "exit()"])
def test_a_cell_may_end_early(pool2: Pool, leave: str) -> None:
    pids = pool2.status().pids
    pool2.run(f"import sys\nreached = 1\nif True:\n    {leave}\nreached = 2")
    assert dict(pool2.run("reached")) == {0: 1, 1: 1}
    assert pool2.status().pids == pids


@pytest.mark.parametrize("leave", ["sys.exit(3)", "raise SystemExit(3)", "exit(3)", "quit(3)"])
def test_an_end_with_a_status_is_an_error(pool2: Pool, leave: str) -> None:
    with pytest.raises(SpmdError, match="SystemExit: 3") as caught:
        pool2.run(f"import sys\n{leave}")
    assert "gpupool/" not in caught.value.first.traceback
    assert dict(pool2.run("rank")) == {0: 0, 1: 1}


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("input('your name? ')", "input(): a rank cannot ask for input. Ask in a cell of"),
        ("import getpass; getpass.getpass()", "getpass(): a rank cannot ask for input. Put the"),
        ("import code; code.interact()", "a rank cannot ask for input"),
        ("help()", "a rank cannot ask for input"),
        ("breakpoint()", "breakpoint(): a rank cannot ask for input. The cell ends here, and"),
        ("import pdb; pdb.set_trace()", "set_trace(): a rank cannot ask for input."),
        (
            "from IPython.core.debugger import set_trace; set_trace()",
            "set_trace(): a rank cannot ask for input.",
        ),
        ("import pdb; pdb.Pdb().set_trace()\nx = 1", "a rank cannot ask for input"),
    ],
)
def test_what_would_wait_for_the_user_is_an_error_at_once(
    pool2: Pool, cell: str, message: str
) -> None:
    with pytest.raises(SpmdError) as caught:
        pool2.run(cell, timeout_s=30)
    assert caught.value.first.ename == "StdinNotImplementedError"
    assert message in str(caught.value)
    assert "(the same on 2 of 2 ranks" in str(caught.value)
    assert dict(pool2.run("rank")) == {0: 0, 1: 1}


def test_the_end_of_the_process_is_told_as_such(pool2: Pool) -> None:
    with pytest.raises(SpmdError, match="rank 1 ended with exit status 5; its variables are lost"):
        pool2.run("import os\nif rank == 1: os._exit(5)\ndist.barrier()", timeout_s=30)


BROKEN = "class Broken:\n    def __repr__(self): raise ValueError('no text')\nBroken()"


def test_a_value_without_a_text_is_no_error(pool2: Pool) -> None:
    result = pool2.run(BROKEN)
    assert result.value_text(0) == "<Broken: its __repr__ raised ValueError>"
    assert plain(result.text(0)).endswith("ValueError: no text\n")  # as in any notebook


def test_half_a_character_is_shown_as_its_number(pool2: Pool) -> None:
    result = pool2.run(r"print('one \ud800 two')")
    assert result.text(0) == "one \\ud800 two\n"
    with pytest.raises(SpmdError) as caught:
        pool2.run(r"raise ValueError('one \ud800 two')")
    error = caught.value.errors[0]
    assert error.evalue == "one \\ud800 two"
    error.traceback.encode()
