"""%gpupool debug through the input of a real notebook."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook.kernel import Kernel
from tests.support.waits import touch

FAILING = """%%spmd
def inner(x):
    y = x + rank
    if rank == 1:
        raise ValueError('bad')
    dist.barrier()
def outer():
    inner(10)
outer()"""
SUM = "%%spmd\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    """A kernel with a pool of two ranks; every test leaves it usable."""
    clean_kernel.run("%load_ext gpupool\n%gpupool start --cpu -n 2")
    nothing = clean_kernel.run("%gpupool debug")
    assert nothing.error_text.startswith("PoolError: nothing has failed on the ranks")
    nothing = clean_kernel.run("%gpupool debug 1")
    assert nothing.text.startswith("There is nothing to look at: ")
    return clean_kernel


@pytest.fixture
def failed(kernel: Kernel) -> Kernel:
    """The kernel after a cell in which rank 1 has failed and rank 0 was freed."""
    assert "rank 1: ValueError: bad" in kernel.run(FAILING).error_text
    return kernel


def usable(kernel: Kernel) -> bool:
    return kernel.run(SUM).text == "[0, 1] 2.0"


def test_the_rank_that_failed_first_is_looked_at_frame_by_frame(failed: Kernel) -> None:
    commands = ["p y", "!y = 99", "p y", "up", "p y", "w", "l", "down", "a", "pp x, 3"]
    cell = failed.run("%gpupool debug", answers=[*commands, "print('said', x)", "nosuch", "q"])
    assert cell.status == "ok"
    where, *said = cell.text.split("\n\n", 1)
    assert "inner()" in where.splitlines()[0]
    assert "raise ValueError('bad')" in where
    text = said[0]
    assert text.startswith("11\n99\n> ")
    assert "outer()" in text.splitlines()[2]
    assert "NameError: name 'y' is not defined" in text
    assert text.rstrip().endswith(
        "x = 10\n(10, 3)\nsaid 10\n*** NameError: name 'nosuch' is not defined"
    )
    assert usable(failed)


def test_the_stop_button_ends_a_command_and_then_the_session(
    failed: Kernel, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    commands = [f"import time; {touch(begun)}; time.sleep(60)", "p 6 * 7", None]
    stops = [
        (lambda cell: begun.exists(), failed.press_stop),
        (lambda cell: len(cell.questions) == 3, failed.press_stop),  # it waits for a command
    ]
    cell = failed.run("%gpupool debug", answers=commands, meanwhile=stops)
    assert (cell.status, cell.errors) == ("ok", [])
    assert "*** KeyboardInterrupt\n42" in cell.text
    assert usable(failed)


def test_a_breakpoint_is_a_place_to_look_at(kernel: Kernel) -> None:
    stopped = kernel.run("%%spmd\nhere = rank + 5\nbreakpoint()\nprint('never')")
    assert "`%gpupool debug RANK` opens the debugger" in stopped.error_text
    cell = kernel.run("%gpupool debug 1", answers=["p here", "q"])
    assert "----> 3 breakpoint()" in cell.text
    assert cell.text.endswith("6")


def test_where_nobody_can_be_asked_the_error_says_what_else_there_is(failed: Kernel) -> None:
    cell = failed.run("%gpupool debug", allow_stdin=False)
    assert "this front end cannot ask for input" in cell.error_text
    assert "error.errors[rank].traceback" in cell.error_text
    assert usable(failed)
