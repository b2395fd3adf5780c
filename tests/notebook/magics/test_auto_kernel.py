"""`%gpupool auto on` and cells in the background, in a real kernel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.kernel import Cell, Condition, Kernel
from tests.support.waits import until_there

START = "%load_ext gpupool\n%gpupool start --cpu -n 2"


@pytest.fixture(scope="module")
def fresh(clean_kernel: Kernel) -> Kernel:
    assert clean_kernel.run(START).status == "ok"
    return clean_kernel


@pytest.fixture
def kernel(fresh: Kernel) -> Iterator[Kernel]:
    """A kernel with a pool of two, auto off before and after."""
    yield fresh
    if "No pool" in fresh.run("%gpupool").text:
        fresh.run(START)
    fresh.run("%gpupool auto off")


@pytest.fixture
def auto(kernel: Kernel) -> Kernel:
    """The same with auto on."""
    assert kernel.run("%gpupool auto on").text.startswith(
        "auto is on: every cell runs on rank 0, 1."
    )
    return kernel


def says(words: str) -> Condition:
    """Whether a cell has said this by now."""
    return lambda cell: words in cell.text


def number_of(cell: Cell) -> int:
    return next(c["execution_count"] for _, kind, c in cell.messages if kind == "execute_input")


# ---- auto ------------------------------------------------------------------------------------


def test_every_cell_runs_on_the_ranks_and_a_sign_says_so(auto: Kernel) -> None:
    cell = auto.run("print('hello', world_size)\nrank * 2")
    sign, output = cell.outputs
    assert sign["data"]["text/plain"] == "auto: 2 ranks"
    assert output["data"]["text/plain"] == f"[0, 1] hello 2\nOut[{number_of(cell)}]:\n[0] 0\n[1] 2"
    assert auto.run("await __import__('asyncio').sleep(0, rank + 7)").text.endswith("[0] 7\n[1] 8")
    assert auto.run("_").text.endswith("[0] 7\n[1] 8")
    assert auto.run("!echo $RANK").text.endswith("[0] 0\n[1] 1")
    assert "int" in auto.run("world_size?").text  # what the pager would show is output
    assert auto.run("").outputs == []


def test_errors_show_the_cells_own_lines(auto: Kernel) -> None:
    cell = auto.run("\nx = 1\n\n1 / 0")
    assert cell.errors[0]["evalue"].endswith(f"; Cell In[{number_of(cell)}], line 4)")
    broken = auto.run("x = 1\ny = (")
    assert f"Cell In[{number_of(broken)}], line 2" in broken.error_text
    timed = auto.run("%%time\nx = 1\n1 / 0")
    assert f"Cell In[{number_of(timed)}], line 3" in timed.error_text


def test_the_way_out_and_the_notebooks_own_cells(auto: Kernel) -> None:
    local = auto.run("%%local\nimport os\nprint('RANK' in os.environ)\n1 / 0")
    assert local.text == "False"
    assert f"Cell In[{number_of(local)}], line 4" in local.error_text
    assert (
        auto.run("%%local\nimport asyncio\nawait asyncio.sleep(0, 'awaited')").text == "'awaited'"
    )
    assert auto.run("%%local\n%%time\nprint('RANK' in os.environ)").text.startswith("False")
    assert auto.run("%spmd rank").text == "[0] 0\n[1] 1"
    assert auto.run("%%spmd -t 0\nprint('one')").text == "[0] one"
    assert "auto is on: every cell runs on rank 0, 1" in auto.run("%gpupool").text
    assert auto.run("%history -l 1").text == "%gpupool"


def test_what_a_front_end_asks_silently_stays_in_the_notebook(auto: Kernel) -> None:
    asked = auto.client.execute("here = 'notebook'", silent=True, store_history=False)
    assert auto._reply(asked)["status"] == "ok"
    assert auto.run("%%local\nhere").text == "'notebook'"


def test_ranks_view_and_time_limit_can_be_chosen(kernel: Kernel) -> None:
    kernel.run("%gpupool auto on -t -1 --view raw --timeout 60")
    cell = kernel.run("print('here', rank)")
    assert [output.get("text") for output in cell.outputs] == [None, "[1] here 1\n"]
    kernel.run("%gpupool auto on -t -1 --view raw --timeout 0.5")
    late = kernel.run("import time\ntime.sleep(60)")
    assert "rank 1: TimeoutError: took longer than 0.5 s" in late.errors[0]["evalue"]
    kernel.run("%gpupool auto off")
    assert kernel.run("1 + 1").text == "2"


def test_stopping_the_pool_puts_it_off_and_says_so(auto: Kernel) -> None:
    assert auto.run("%gpupool stop").text == (
        "Pool stopped.\nauto is off: cells run in the notebook again."
    )
    assert auto.run("'RANK' in __import__('os').environ").text == "False"


def test_a_dead_rank_is_replaced_and_the_next_cell_runs_on_the_ranks(auto: Kernel) -> None:
    auto.run("import os, signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)")
    assert "[1] 1" in auto.run("print(rank)").text


KILL_CONTROLLER = """%%local
import os, psutil
for process in psutil.Process(os.getpid()).children(recursive=True):
    if process.name() == "gpupool:control":
        process.kill()
"""
WAIT_UNTIL_BROKEN = """%%local
import time, gpupool
while gpupool.current_pool().status().state != "broken":
    time.sleep(0.05)
"""


def test_a_lost_pool_puts_it_off_and_nothing_runs_by_mistake(auto: Kernel) -> None:
    auto.run(KILL_CONTROLLER)
    auto.run(WAIT_UNTIL_BROKEN)
    refused = auto.run("touched = 1")
    assert refused.status == "error"
    assert "the controller of the pool was killed by SIGKILL" in refused.error_text
    assert "This cell was not run. auto is off now" in refused.error_text
    assert auto.run("'touched' in globals()").text == "False"
    assert auto.run("%gpupool stop").status == "ok"


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


def test_loading_the_extension_again_says_what_it_ends_and_loses_no_error(
    auto: Kernel, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    begun = auto.run(f"%%spmd --nowait -o handle\n{until_there(go)}\n1 / 0")
    again = auto.run("%reload_ext gpupool")
    assert again.text == ("auto is off: gpupool was unloaded. `%gpupool auto on` puts it on again.")
    assert auto.run("%unload_ext gpupool").text == ""
    go.touch()
    told = auto.run(DONE).text
    name = f"cell In[{number_of(begun)}]"
    assert told.startswith(f"{name} (--nowait) has failed: ZeroDivisionError: division by zero")
    assert auto.run("1").text == "1"
    assert auto.run("%load_ext gpupool").status == "ok"


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


def test_a_restart_ends_what_runs_in_the_background(kernel: Kernel) -> None:
    kernel.run("%%spmd --nowait -o handle\nimport time\ntime.sleep(60)")
    assert kernel.run("%gpupool restart").status == "ok"
    deadline = time.monotonic() + 60
    while kernel.run("handle.done()").text != "True":
        assert time.monotonic() < deadline
    assert "the rank was restarted" in kernel.run("handle.result()").errors[0]["evalue"]
    assert kernel.run("%spmd rank").text == "[0] 0\n[1] 1"


def test_a_stopped_pool_ends_what_runs_and_what_waits(kernel: Kernel) -> None:
    kernel.run("%%spmd --nowait -o runs\nimport time\ntime.sleep(60)")
    kernel.run("%%spmd --nowait -o waits\nimport time\ntime.sleep(60)")
    kernel.run("%gpupool stop")
    assert "the pool was stopped" in kernel.run("runs.result()").error_text
    assert "this pool was stopped" in kernel.run("waits.result()").error_text
