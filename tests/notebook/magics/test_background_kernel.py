"""Cells in the background (`--nowait`), and tracebacks, in a real kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook.kernel import Cell, Condition, Kernel
from tests.support.waits import until_there


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    assert clean_kernel.run("%load_ext gpupool\n%gpupool start --cpu -n 2").status == "ok"
    return clean_kernel


def says(words: str) -> Condition:
    """Whether a cell has said this by now."""
    return lambda cell: words in cell.text


def number_of(cell: Cell) -> int:
    return next(c["execution_count"] for _, kind, c in cell.messages if kind == "execute_input")


# ---- %debug, %xmode, chains --------------------------------------------------------------------


def test_debug_begins_at_the_users_line(kernel: Kernel) -> None:
    kernel.run(
        "def outer():\n    mine = 5\n    import gpupool\n    gpupool.current_pool().run('1/0')"
    )
    kernel.run("outer()")
    cell = kernel.run("%debug", answers=["p mine", "q"])
    assert "----> 4     gpupool.current_pool().run('1/0')" in cell.text
    assert "\n5" in cell.text


@pytest.mark.parametrize("mode", ["Plain", "Verbose", "Minimal"])
def test_no_mode_of_tracebacks_shows_frames_of_ours(kernel: Kernel, mode: str) -> None:
    kernel.run(f"%xmode {mode}")
    cell = kernel.run("%%spmd\n1 / 0")
    kernel.run("%xmode Context")
    assert f"Cell In[{number_of(cell)}], line 2" in cell.error_text
    assert "gpupool" not in cell.error_text


# ---- --nowait ----------------------------------------------------------------------------------


DONE = "import time\nwhile not handle.done():\n    time.sleep(0.02)"


def test_an_error_that_nobody_asks_for_is_told_once_below_a_later_cell(
    kernel: Kernel, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    begun = kernel.run(f"%%spmd --nowait -o handle\n{until_there(go)}\n1 / 0")
    go.touch()
    told = kernel.run(DONE).text
    name = f"cell In[{number_of(begun)}]"
    assert told.startswith(f"{name} (--nowait) has failed: ZeroDivisionError: division by zero")
    assert kernel.run("1").text == "1"
    assert kernel.run("handle").text.startswith("SpmdRun(failed: ZeroDivisionError")
    assert "----> 4 1 / 0" in kernel.run("await handle").text


def test_an_error_that_is_asked_for_is_not_told_besides(kernel: Kernel) -> None:
    kernel.run("%%spmd --nowait -o handle\n1 / 0")
    asked = kernel.run("handle.result()")
    assert [output["type"] for output in asked.outputs] == ["display_data", "error"]
    assert kernel.run("2").text == "2"


def test_a_cell_waits_for_the_one_in_the_background_and_says_so(
    kernel: Kernel, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    begun = kernel.run(f"%%spmd --nowait -o handle\n{until_there(go)}\ndist.barrier()\n1")
    name = f"cell In[{number_of(begun)}]"
    waits = kernel.run(
        "%%spmd\ndist.barrier()\nprint('second')", meanwhile=[(says(name), go.touch)]
    )
    assert waits.text == f"gpupool: waiting for {name} to end…\n[0, 1] second"
    assert kernel.run("handle.done(), handle").text == "(True, SpmdRun(done))"
    assert kernel.run("handle.result(timeout=60)[1]").text.endswith("1")


def test_the_stop_button_ends_the_waiting_and_not_what_runs_before(
    kernel: Kernel, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    kernel.run(f"%%spmd --nowait -o handle\n{until_there(go)}\n39")
    waits = says("gpupool: waiting for cell In[")
    stopped = kernel.run("%%spmd\nnever = 1", meanwhile=[(waits, kernel.press_stop)])
    assert "interrupted while it waited for cell In[" in stopped.errors[0]["evalue"]
    assert kernel.run("handle.done()").text == "False"
    go.touch()
    assert kernel.run("(await handle)[0]").text.endswith("39")


def test_stopping_the_pool_ends_what_runs_and_what_waits(kernel: Kernel) -> None:
    kernel.run("%%spmd --nowait -o runs\nimport time\ntime.sleep(60)")
    kernel.run("%%spmd --nowait -o waits\nimport time\ntime.sleep(60)")
    kernel.run("%gpupool stop")
    assert "the pool was stopped" in kernel.run("runs.result()").error_text
    assert "this pool was stopped" in kernel.run("waits.result()").error_text
