"""An inline pool in a real kernel: debugging as a user does it, and nothing shown twice."""

from __future__ import annotations

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.notebook.kernel import Cell, Kernel, plain
from tests.notebook.terminal import Terminal
from tests.support.raising import frames_of_ours
from tests.support.waits import touch, until_there

START = "%load_ext gpupool\n%gpupool start --inline --cpu"
DATA = """
import gpupool, time
from torch.utils.data import Dataset
class Slow(Dataset):
    def __init__(self, stop_at=-1): self.stop_at = stop_at
    def __len__(self): return 40
    def __getitem__(self, index):
        time.sleep(0.005)
        if index == self.stop_at: breakpoint()
        return torch.ones(8), torch.tensor(index % 3)
def train(data, epochs):
    options = gpupool.TrainingOptions(epochs=epochs, batch_size=8)
    return gpupool.train(torch.nn.Linear(8, 3), data, options=options)
"""


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    """A kernel that is its own pool; every test leaves it usable."""
    assert clean_kernel.run(START).status == "ok"
    assert clean_kernel.run(DATA).status == "ok"
    return clean_kernel


def test_the_status_says_inline(kernel: Kernel) -> None:
    pid = kernel.run("import os; print(os.getpid())").text
    status = kernel.run("%gpupool")
    first, rank = status.text.splitlines()
    assert first == "Pool of 1: idle, inline (this process), CPU, gloo"
    assert rank.startswith("  rank 0  CPU  ")
    assert rank.endswith(f" pid {pid}")
    assert "inline (this process)" in status.html
    assert "Rank 0 is this process" in kernel.run("%gpupool log").text


# ---- output ----------------------------------------------------------------------------------


def test_a_cell_runs_in_the_notebooks_namespace_and_shows_everything_once(kernel: Kernel) -> None:
    kernel.run("mine = [1]")
    cell = kernel.run("%%spmd -o r\nmine.append(rank)\nprint('hello')\nmine")
    assert [output["type"] for output in cell.outputs] == ["stream", "display_data"]
    assert cell.text == "hello\n[1, 0]"
    assert kernel.run("r.text(0), r[0], mine").text == "('hello\\n', [1, 0], [1, 0])"


def test_the_value_of_an_expression_is_shown_once_and_the_notebooks_own_stay(
    kernel: Kernel,
) -> None:
    kernel.run("'before'")
    assert [o["data"]["text/plain"] for o in kernel.run("%spmd rank + 1").outputs] == ["[0] 1"]
    # a semicolon at the end of the notebook's cell does not lose the value of the inner one
    assert kernel.run("x = gpupool.current_pool().run('40 + 2');").outputs == []
    assert kernel.run("print(x[0])").text == "42"
    numbers = kernel.run("print([type(value).__name__ for value in Out.values()][-2:])").text
    assert numbers == "['str', 'SpmdResult']"


def test_text_comes_while_the_cell_runs(kernel: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    come = [(lambda cell: cell.text == "early", go.touch)]
    cell = kernel.run(f"%%spmd\nprint('early', flush=True)\n{until_there(go)}", meanwhile=come)
    assert cell.status == "ok"


def test_figures_are_shown_once_and_kept(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%spmd -o r\nfrom IPython.display import HTML\ndisplay(HTML('<b>x</b>'))\nHTML('<i>y</i>')"
    )
    assert [output["data"]["text/html"] for output in cell.outputs] == ["<b>x</b>", "<i>y</i>"]
    assert kernel.run("print(len(r.outputs[0].displays), repr(r.text(0)))").text == "2 ''"


def test_the_output_of_c_code_comes_too(kernel: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    code = f"%%spmd -o r\nimport os\nos.write(1, b'from C\\n')\n{until_there(go)}"
    come = [(lambda cell: cell.text == "from C", go.touch)]
    assert kernel.run(code, meanwhile=come).text == "from C"
    assert kernel.run("print(r.text(0))").text == "from C"


def test_quiet_hides_the_value_and_a_handle_has_it(kernel: Kernel) -> None:
    assert kernel.run("%%spmd --view quiet\n5").outputs == []
    begun = kernel.run("%%spmd --nowait -o handle\nprint('said')\nrank + 7")
    assert begun.text == "said\nSpmdRun(done)"
    assert kernel.run("await handle").text == "7"


def test_await_works_in_a_cell_and_hears_the_stop_button(kernel: Kernel, tmp_path: Path) -> None:
    cell = kernel.run("%%spmd\nimport asyncio\nawait asyncio.sleep(0.01)\nprint('awaited')")
    assert cell.text == "awaited"
    waits = tmp_path / "waits"
    tell = f"asyncio.get_running_loop().call_soon(lambda: {touch(waits)})"  # once the cell waits
    stopped = kernel.run(
        f"%%spmd\nimport asyncio\n{tell}\nawait asyncio.sleep(60)",
        meanwhile=[(lambda cell: waits.exists(), kernel.press_stop)],
    )
    assert "KeyboardInterrupt" in stopped.error_text
    assert "----> 4 await asyncio.sleep(60)" in stopped.error_text
    assert kernel.run("await asyncio.sleep(0.01)\n5").text == "5"  # the kernel's own loop goes on


# ---- errors ----------------------------------------------------------------------------------


def test_an_error_is_one_output_with_the_line_of_this_cell(kernel: Kernel) -> None:
    cell = kernel.run("%%spmd\nprint('before')\nraise ValueError('bad row')")
    number = next(c["execution_count"] for _, kind, c in cell.messages if kind == "execute_input")
    assert [error["ename"] for error in cell.errors] == ["SpmdError"]
    assert cell.errors[0]["evalue"] == (
        f"rank 0: ValueError: bad row (1 of 1 ranks failed; Cell In[{number}], line 3)"
    )
    assert f"Cell In[{number}], line 3" in cell.error_text
    assert not frames_of_ours(cell.error_text)
    assert cell.text == "before"
    assert kernel.run("%spmd rank").text == "[0] 0"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x = (", "SyntaxError"),
        ("%nosuch", "UsageError"),
        ("raise ExceptionGroup('many', [ValueError(1)])", "ExceptionGroup: many"),
    ],
)
def test_every_kind_of_error_is_told_once(kernel: Kernel, code: str, told: str) -> None:
    cell = kernel.run(f"%%spmd\n{code}")
    assert [output["type"] for output in cell.outputs] == ["error"]
    assert told in cell.error_text
    assert not frames_of_ours(cell.error_text)


def test_the_stop_button_and_a_time_limit_end_a_cell(kernel: Kernel, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    sleeps = [(lambda cell: begun.exists(), kernel.press_stop)]
    cell = kernel.run(f"%%spmd\nimport time\n{touch(begun)}\ntime.sleep(60)", meanwhile=sleeps)
    assert "KeyboardInterrupt" in cell.error_text
    late = kernel.run("%%spmd --timeout 0.5\nimport time\ntime.sleep(60)")
    assert "took longer than 0.5 s" in late.error_text
    assert not frames_of_ours(late.error_text)
    assert kernel.run("%spmd rank").text == "[0] 0"


# ---- debugging -------------------------------------------------------------------------------


def test_a_breakpoint_in_a_cell(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%spmd\ndef halve(row):\n    half = row / 2\n    breakpoint()\n    return half\nhalve(6)",
        answers=["p half", "p rank", "half = 10", "c"],
    )
    assert cell.status == "ok"
    # from Python 3.13 on the debugger stops at the breakpoint itself, not after it
    assert re.search("----> (4     breakpoint|5     return half)", cell.text)
    assert "\n3.0\n0\n" in cell.text
    assert cell.text.endswith("\n10")


def test_leaving_the_debugger_ends_the_cell(kernel: Kernel) -> None:
    cell = kernel.run("%%spmd\nbreakpoint()\nafter = 1", answers=["q"])
    assert cell.errors[0]["evalue"].startswith("rank 0: BdbQuit (1 of 1 ranks failed")
    assert "NameError" in kernel.run("after").error_text


def test_a_breakpoint_in_a_function_of_the_notebook(kernel: Kernel) -> None:
    kernel.run("def work(row):\n    third = row / 3\n    breakpoint()\n    return third")
    cell = kernel.run("print(gpupool.current_pool().run(work, 6)[0])", answers=["p third", "c"])
    assert re.search("----> (3     breakpoint|4     return third)", cell.text)
    assert cell.text.endswith("2.0")


def test_input_works_in_a_cell(kernel: Kernel) -> None:
    cell = kernel.run("%%spmd\nname = input('who? ')\nname * 2", answers=["ab"])
    assert cell.text.endswith("'abab'")


def test_the_debugger_for_ranks_sends_to_that_of_ipython(kernel: Kernel) -> None:
    assert "%debug opens the debugger" in kernel.run("%gpupool debug").error_text


def test_a_group_that_a_cell_has_left_is_there_in_the_next_one(kernel: Kernel) -> None:
    assert kernel.run("%%spmd\ndist.destroy_process_group()").status == "ok"
    assert kernel.run("%spmd dist.get_world_size()").text == "[0] 1"


def test_debug_afterwards_stops_in_the_users_frame(kernel: Kernel) -> None:
    kernel.run("%%spmd\ndef double(row):\n    bad = row * 2\n    raise ValueError(bad)\ndouble(21)")
    cell = kernel.run("%debug", answers=["p bad", "up", "p rank", "q"])
    assert "----> 4     raise ValueError(bad)" in cell.text
    assert "\n42\n" in cell.text
    assert cell.text.endswith("\n0")
    kernel.run("gpupool.current_pool().run(work, 'x')")
    cell = kernel.run("%debug", answers=["p row", "q"])
    assert cell.text.endswith("'x'")


def test_pdb_on_opens_once(kernel: Kernel) -> None:
    kernel.run("%pdb on")
    cell = kernel.run("%%spmd\nz = 3\n1 / 0", answers=["p z", "q"])
    kernel.run("%pdb off")
    assert cell.text.count("----> 3 1 / 0") == 1
    assert cell.text.endswith("\n3")


def test_a_breakpoint_in_a_data_set_while_training(kernel: Kernel) -> None:
    cell = kernel.run("train(Slow(stop_at=5), 1)", answers=["p index", "c"])
    assert "\n5\n" in cell.text
    assert "Finished: 1 epoch" in cell.text


# ---- training --------------------------------------------------------------------------------


def test_the_monitor_moves_and_the_stop_button_keeps_the_network(kernel: Kernel) -> None:
    def moves(cell: Cell) -> bool:
        return sum(kind == "comm_msg" for _, kind, _ in cell.messages) >= 4

    cell = kernel.run("result = train(Slow(), 1000)", meanwhile=[(moves, kernel.press_stop)])
    assert cell.status == "ok"
    assert kernel.run("print(result.stopped_by)").text == "user"
    assert "Stopped after step" in cell.text


def test_without_waiting_it_is_over_at_once(kernel: Kernel) -> None:
    code = "run = gpupool.train(torch.nn.Linear(8, 3), Slow(), wait=False)\nprint(run.done())"
    assert kernel.run(code.replace("Slow()", "Slow(), options=one_epoch")).status == "error"
    kernel.run("one_epoch = gpupool.TrainingOptions(epochs=1)")
    shown = kernel.run(code.replace("Slow()", "Slow(), options=one_epoch") + "\nrun.result()")
    assert "TrainingResult: finished" in shown.text


# ---- the notebook itself ---------------------------------------------------------------------


def test_the_notebook_gets_back_what_it_had(kernel: Kernel) -> None:
    assert kernel.run("%gpupool stop").status == "ok"
    kernel.run("rank, torch = 'my rank', 'my torch'")
    state = (
        "import os, sys, signal; k = get_ipython().kernel; "
        "print(sorted(k.control_handlers), signal.getsignal(signal.SIGINT), "
        "get_ipython().ask_exit.__func__, 'RANK' in os.environ)"
    )
    before = kernel.run(state).text
    started = kernel.run(START)
    assert "what you had as rank, torch is put aside" in started.text
    assert kernel.run("print(rank, torch.__name__, os.environ['RANK'])").text == "0 torch 0"
    kernel.run("world_size = 'changed by the user'")
    assert kernel.run("%gpupool stop").text == "Pool stopped."
    assert kernel.run("print(rank, torch, world_size)").text == (
        "my rank my torch changed by the user"
    )
    assert "NameError" in kernel.run("device").error_text
    assert kernel.run(state).text == before
    refused = kernel.run("import gpupool; gpupool.current_pool()")
    assert "no pool runs" in refused.error_text
    assert kernel.run(START).status == "ok"


@pytest.mark.long
def test_run_all_stops_at_a_failing_cell() -> None:
    cells = [
        START,
        "%%spmd\nprint('hello')",
        "%%spmd\nraise RuntimeError('here')",
        "print('never')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="RuntimeError: here"):
        nbclient.NotebookClient(notebook, timeout=60).execute()
    _, hello, failed, never = (cell.outputs for cell in notebook.cells)
    assert hello[0]["text"] == "hello\n"
    assert "Cell In[3], line 2" in plain("\n".join(failed[0]["traceback"]))
    assert never == []


def test_in_a_terminal(clean_terminal: Terminal) -> None:
    terminal = clean_terminal
    terminal.run("%load_ext gpupool\nx = 5")
    started = terminal.run("%gpupool start --inline --cpu").stdout
    assert started.startswith("Pool of 1: idle, inline (this process), CPU, gloo\n  rank 0  CPU")
    shown = terminal.run("%%spmd -o r\nprint('hello', x)\nx + rank")
    assert shown.stdout == "hello 5\n5\n"
    assert terminal.run("print(repr(r.text(0)), r[0])").stdout == "'hello 5\\n' 5\n"
    failed = terminal.run("%%spmd\nimport asyncio\nawait asyncio.sleep(0)\n1 / 0").stdout
    assert failed.startswith("SpmdError: rank 0: ZeroDivisionError")
    figure = "%%spmd -o r\nfrom IPython.display import HTML\ndisplay(HTML('x'))"
    assert terminal.run(figure).stdout == "<IPython.core.display.HTML object>\n"
    assert terminal.run("print(repr(r.text(0)))").stdout == "''\n"
    assert terminal.run("%gpupool stop").stdout == "Pool stopped.\n"
    assert "NameError" in terminal.run("rank").stdout
