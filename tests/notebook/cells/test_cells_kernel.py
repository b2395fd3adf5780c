"""Cells as a user of a notebook sees them: a real kernel, two real ranks, message by message."""

from __future__ import annotations

import ast
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpupool.notebook.cells.views import REDRAW_EVERY_S
from tests.notebook.kernel import Cell, Condition, Kernel, draws, plain
from tests.support.raising import frames_of_ours
from tests.support.waits import peers, touch, until_there


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    """A kernel with a pool of two ranks, and what the tests display with; each leaves it usable."""
    started = clean_kernel.run("%load_ext gpupool\n%gpupool start -n 2 --cpu")
    clean_kernel.started = started  # type: ignore[attr-defined]
    names = "import sys, time, threading, ipywidgets\nfrom IPython.display import HTML, display"
    clean_kernel.run(f"%%spmd\n{names}\nkept = rank + 10")
    nothing = clean_kernel.run("%gpupool debug")
    assert nothing.error_text.startswith("PoolError: nothing has failed on the ranks")
    nothing = clean_kernel.run("%gpupool debug 1")
    assert nothing.text.startswith("There is nothing to look at: ")
    return clean_kernel


def says(words: str) -> Condition:
    return lambda cell: words in cell.text


def outputs_of(cell: Cell) -> list[str]:
    """What it has shown; how often that was drawn anew depends on how long the cell took."""
    others = ("status", "execute_input", "update_display_data", "comm_msg")
    return [kind for _, kind, _ in cell.messages if kind not in others]


def assert_is_short(text: str) -> None:
    assert not frames_of_ours(text)
    assert "ipyparallel" not in text


def assert_usable(kernel: Kernel) -> None:
    assert kernel.run("%%spmd\ndist.barrier()\nkept").text == "[0] 10\n[1] 11"


# ---- the pool --------------------------------------------------------------------------------


def test_the_start_shows_progress_and_then_the_pool_in_its_place(kernel: Kernel) -> None:
    started: Cell = kernel.started  # type: ignore[attr-defined]
    *lines, end, _bar = [data["text/plain"] for data in started.drawn]
    assert lines
    assert all(re.fullmatch(r"Starting the pool \(.+\) \[00:(\d\d)\]", line) for line in lines)
    assert end == ""
    (bar,) = started.outputs
    first, *ranks = bar["data"]["text/plain"].splitlines()
    assert first == "Pool of 2: idle, CPU ranks, gloo, shuts down in 30 min if idle"
    assert len(ranks) == 2
    assert "<b>Pool of 2</b>" in started.html


# ---- values and output -----------------------------------------------------------------------


def test_the_value_is_shown_once_and_kept(kernel: Kernel) -> None:
    cell = kernel.run("%%spmd\nprint('said')\nrank * 2")
    assert outputs_of(cell) == ["display_data"]
    number = cell.number
    assert cell.text == f"[0, 1] said\nOut[{number}]:\n[0] 0\n[1] 2"
    assert kernel.run("_[1], _.text(0)").text == "(2, 'said\\n')"
    again = kernel.run(f"Out[{number}]")
    assert outputs_of(again) == ["execute_result"]
    assert again.text == cell.text
    assert "2 ranks" in again.html
    assert kernel.run(f"[Out[{number}]]").text.startswith("[SpmdResult(2 ranks, ")
    cell = kernel.run("%spmd print('said') or rank")  # an expression
    assert outputs_of(cell) == ["display_data", "execute_result"]
    assert cell.text == "[0, 1] said\n[0] 0\n[1] 1"
    assert kernel.run("x = %spmd rank").outputs == []
    assert kernel.run("x").text == "[0] 0\n[1] 1"


def test_output_is_shown_while_the_cell_runs_and_grouped_at_the_end(
    kernel: Kernel, tmp_path: Path
) -> None:
    seen = {0: tmp_path / "0", 29: tmp_path / "29"}  # each step is seen before the next one
    waits = "\n".join(
        f"    if i == {i}:\n{until_there(path, margin=' ' * 8)}" for i, path in seen.items()
    )
    cell = kernel.run(
        f"%%spmd\nfor i in range(31):\n    print('step', i, flush=True)\n{waits}",
        meanwhile=[(draws(f"step {i}"), path.touch) for i, path in seen.items()],
    )
    live = cell.drawn[:-1]
    assert not any("step 30" in data["text/plain"] for data in live if data is not live[-1])
    assert all(len(data["text/plain"].splitlines()) <= 20 for data in live)
    (output,) = cell.outputs  # one display, whose content was replaced
    lines = [f"step {i}" for i in range(31)]
    assert output["data"]["text/plain"].split() == " ".join(["[0, 1]", *lines]).split()
    assert "✓ 2 ok" in cell.html
    assert "identical on 2 ranks" in cell.html


def test_a_flood_is_bounded_and_its_end_is_right(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%spmd -o flood\nfor i in range(100_000):\n    print('x' * 99)\nprint('last', rank)",
        timeout_s=150,
    )
    assert cell.status == "ok"
    # each time little, and not too often
    assert max(len(str(content)) for _, _, content in cell.messages) < 200_000
    assert len(cell.drawn) <= cell.elapsed_s / REDRAW_EVERY_S + 2
    assert "last 0" in cell.text
    assert "lines left out: flood.text(0) ...]" in cell.text
    assert kernel.run("flood.text(1)[-7:]").text == "'last 1\\n'"


def test_figures_are_shown_with_their_ranks_and_updated_in_their_place(
    kernel: Kernel, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    cell = kernel.run(
        "%%spmd\nfrom PIL import Image\ndisplay(HTML(f'<i>rank {rank}</i>'))\n"
        "display(Image.new('RGB', (4, 4), (255 * rank, 0, 0)))\n"
        "h = display(HTML('<b>first</b>'), display_id=True)\n"
        f"{until_there(first)}\nh.update(HTML('<b>second</b>'))\n{until_there(second)}",
        meanwhile=[(draws("<b>first</b>"), first.touch), (draws("<b>second</b>"), second.touch)],
    )
    assert [output["type"] for output in cell.outputs] == ["display_data"]
    for rank in (0, 1):
        assert f"<b>[{rank}]</b></summary><i>rank {rank}</i>" in cell.html
    assert cell.html.count("data:image/png;base64,") == 2
    folded = re.findall(r"<details( open)?><summary[^>]*><b>\[(\d)\]</b></summary><img", cell.html)
    assert folded == [(" open", "0"), ("", "1")]
    assert 'alt="' in cell.html
    assert "first" not in cell.html
    assert cell.html.count("<b>second</b>") == 1
    cell = kernel.run("%%spmd\ndisplay({'application/json': {'a': 1}}, raw=True)")
    assert any("application/json" in output["data"] for output in cell.outputs)  # beside the HTML
    assert "[0, 1]" in cell.text


def late_display(kernel: Kernel, *wanted: str, timeout_s: float = 60.0) -> dict[str, Any]:
    """A display of a cell that is over whose text has all that is wanted in it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        message: dict[str, Any] = kernel.client.get_iopub_msg(timeout=timeout_s)
        text = message["content"].get("data", {}).get("text/plain", "")
        if all(words in text for words in wanted):
            return message
    raise AssertionError(f"{wanted!r} did not come")


@pytest.mark.parametrize("said", ["", "print('at once')\n"])
def test_late_text_appears_under_its_own_cell(kernel: Kernel, said: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    late = f"def late():\n{until_there(go, margin='    ')}\n    print('late', rank)"
    start = "threading.Thread(target=late).start()"
    begun = kernel.run(f"%%spmd -o mine\n{late}\nseen = 1\n{said}{start}")
    assert "late" not in begun.text + kernel.run("seen[0]").text
    go.touch()
    last = late_display(kernel, "late 0", "late 1")
    for _, kind, shown in begun.messages:  # it is changed; without one, one is added to the cell
        if kind == "display_data":
            assert last["content"]["transient"] == shown["transient"]
    assert kernel.run("mine.text(1).splitlines()[-1]").text == "'late 1'"
    assert "late" not in kernel.run("%%spmd\nprint('next')").text


# ---- composites --------------------------------------------------------------------------------


def ask(kernel: Kernel, kind: str, code: str) -> dict[str, Any]:
    content = {"code": code, "cursor_pos": len(code), "detail_level": 0}
    request = kernel.client.session.msg(kind, content)
    kernel.client.shell_channel.send(request)
    while True:
        reply = kernel.client.get_shell_msg(timeout=120)
        if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
            return dict(reply["content"])


def complete(kernel: Kernel, code: str) -> list[str]:
    return list(ask(kernel, "complete_request", code)["matches"])


def test_a_composite_shows_what_each_rank_has_equal_values_once(kernel: Kernel) -> None:
    cell = "%%spmd\nlayer = torch.nn.Linear(2, 3)\nshare = [rank] * (2 + rank)\nsame = 'yes'"
    assert kernel.run(cell).status == "ok"
    assert kernel.run("same").text == "same on 2 ranks\n[0, 1] str of 3  'yes'"
    kernel.run("%%spmd\nm = torch.zeros(2, 1)")
    assert kernel.run("m").text.splitlines()[1:] == [
        "[0, 1] Tensor 2x1 float32 cpu  tensor([[0.],",
        "                                       [0.]])",
    ]
    shown = kernel.run("share").text
    assert shown == "share on 2 ranks\n[0] list of 2  [0, 0]\n[1] list of 3  [1, 1, 1]"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("layer.weight.req", ["requires_grad", "requires_grad_"]),
        ("share.app", ["append"]),
        ("layer.gath", ["gather"]),
    ],
)
def test_completion_knows_the_attributes_of_the_ranks_values(
    kernel: Kernel, code: str, found: list[str]
) -> None:
    assert complete(kernel, code) == found


def test_while_a_cell_runs_completion_does_not_wait_for_it(kernel: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    kernel.run(f"%%spmd --nowait -o slow\n{until_there(go)}")
    assert complete(kernel, "share.app") == []
    assert kernel.run("slow.done()").text == "False"
    go.touch()
    kernel.run("slow.result()")
    assert complete(kernel, "share.app") == ["append"]


def test_question_mark_says_what_a_composite_is_and_tab_what_is_for_users(kernel: Kernel) -> None:
    text = plain(ask(kernel, "inspect_request", "same")["data"]["text/plain"])
    assert "One value per rank" in text
    kernel.run("import gpupool\npool = gpupool.current_pool()")
    offered = {match.rpartition(".")[2] for match in complete(kernel, "pool.")}
    assert {"run", "put", "stop", "restart", "sync_from", "status"} <= offered
    assert not {"ask", "begin", "execute", "forget_listeners", "variables", "turns"} & offered


# ---- errors ----------------------------------------------------------------------------------


def test_an_error_is_one_output_with_the_line_of_this_cell(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(f"%%spmd\n{peers(tmp_path / 'waits')}")
    cell = kernel.run(
        "%%spmd\nprint('before')\nif rank == 1:\n"
        "    until_told(); raise ValueError('bad row')\ndist.barrier()"
    )
    number = cell.number
    assert [error["ename"] for error in cell.errors] == ["SpmdError"]
    assert cell.errors[0]["evalue"] == (
        "rank 1: ValueError: bad row "
        f"(1 of 2 ranks failed, 1 was waiting; Cell In[{number}], line 4)"
    )
    assert cell.error_text == f"SpmdError: {cell.errors[0]['evalue']}"  # the rest stands above
    said, *traceback = cell.text.splitlines()
    assert said == "[0, 1] before"  # what was printed is not lost
    assert f"Cell In[{number}], line 4" in traceback  # as the notebook counts: %%spmd is 1
    assert "----> 4     until_told(); raise ValueError('bad row')" in traceback
    assert traceback[-1] == f"rank 0: waiting in barrier (Cell In[{number}], line 5)"
    assert_is_short(cell.text)
    assert "✗ 1 failed" in cell.html
    assert "1 was waiting" in cell.html
    assert_usable(kernel)


def test_debug_begins_at_the_users_line_and_no_mode_of_tracebacks_shows_ours(
    kernel: Kernel,
) -> None:
    kernel.run(
        "def outer():\n    mine = 5\n    import gpupool\n    gpupool.current_pool().run('1/0')"
    )
    kernel.run("outer()")
    cell = kernel.run("%debug", answers=["p mine", "q"])
    assert "----> 4     gpupool.current_pool().run('1/0')" in cell.text
    assert "\n5" in cell.text
    for mode in ("Plain", "Verbose", "Minimal"):
        kernel.run(f"%xmode {mode}")
        cell = kernel.run("%%spmd\n1 / 0")
        assert f"Cell In[{cell.number}], line 2" in cell.error_text
        assert "gpupool" not in cell.error_text
    kernel.run("%xmode Context")


# ---- %gpupool debug --------------------------------------------------------------------------

FAILING = """%%spmd
def inner(x):
    y = x + rank
    if rank == 1:
        raise ValueError('bad')
    dist.barrier()
def outer():
    inner(10)
outer()"""


def test_the_rank_that_failed_first_is_looked_at_frame_by_frame(kernel: Kernel) -> None:
    kernel.run(FAILING)
    commands = ["p y", "!y = 99", "p y", "up", "p y", "w", "l", "down", "a", "pp x, 3"]
    cell = kernel.run("%gpupool debug", answers=[*commands, "print('said', x)", "nosuch", "q"])
    assert cell.status == "ok"
    where, said = cell.text.split("\n\n", 1)
    assert "inner()" in where.splitlines()[0]
    assert "raise ValueError('bad')" in where
    assert said.startswith("11\n99\n> ")
    assert "outer()" in said.splitlines()[2]
    assert "NameError: name 'y' is not defined" in said
    assert said.rstrip().endswith(
        "x = 10\n(10, 3)\nsaid 10\n*** NameError: name 'nosuch' is not defined"
    )
    cell = kernel.run("%gpupool debug", allow_stdin=False)
    assert (cell.status, cell.text) == ("ok", where)
    assert_usable(kernel)


def test_the_stop_button_ends_a_command_and_then_the_session(
    kernel: Kernel, tmp_path: Path
) -> None:
    kernel.run(FAILING)
    begun = tmp_path / "begun"
    commands = [f"import time; {touch(begun)}; time.sleep(60)", "p 6 * 7", None]
    stops = [
        (lambda cell: begun.exists(), kernel.press_stop),
        (lambda cell: len(cell.questions) == 3, kernel.press_stop),  # it waits for a command
    ]
    cell = kernel.run("%gpupool debug", answers=commands, meanwhile=stops)
    assert (cell.status, cell.errors) == ("ok", [])
    assert "*** KeyboardInterrupt\n42" in cell.text
    assert_usable(kernel)


def test_a_breakpoint_is_a_place_to_look_at(kernel: Kernel) -> None:
    stopped = kernel.run("%%spmd\nhere = rank + 5\nbreakpoint()\nprint('never')")
    assert "`%gpupool debug RANK` opens the debugger" in stopped.error_text
    cell = kernel.run("%gpupool debug 1", answers=["p here", "q"])
    assert "----> 3 breakpoint()" in cell.text
    assert cell.text.endswith("6")


# ---- the stop button ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "{begun}; import time\ntime.sleep(60)",
        "{begun}\nwhile True:\n    pass",
        "{begun}; import subprocess\nsubprocess.run(['sleep', '60'])",
        "if rank == 0:\n    {begun}; import time\n    time.sleep(60)\ndist.barrier()",
    ],
)
def test_it_ends_a_cell_and_the_next_one_works(kernel: Kernel, code: str, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    runs = [(lambda cell: begun.exists(), kernel.press_stop)]
    cell = kernel.run(f"%%spmd\n{code.format(begun=touch(begun))}", meanwhile=runs)
    assert cell.elapsed_s < 40  # and not the minute
    assert [error["ename"] for error in cell.errors] == ["SpmdError"]
    assert "KeyboardInterrupt" in cell.error_text
    assert_is_short(cell.error_text)
    assert_usable(kernel)


def test_it_ends_a_cell_of_the_background_that_is_waited_for(kernel: Kernel) -> None:
    kernel.run("%%spmd --nowait -o handle\nimport time\ntime.sleep(60)")
    waits = [(draws("running"), kernel.press_stop)]  # which it shows after two seconds
    cell = kernel.run("await handle", meanwhile=waits)
    assert [error["ename"] for error in cell.errors] == ["SpmdError"]
    assert_is_short(cell.error_text)
    assert_usable(kernel)


# ---- --nowait ----------------------------------------------------------------------------------


DONE = "import time\nwhile not handle.done():\n    time.sleep(0.02)"


def test_an_error_that_nobody_asks_for_is_told_once_below_a_later_cell(
    kernel: Kernel, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    begun = kernel.run(f"%%spmd --nowait -o handle\n{until_there(go)}\n1 / 0")
    go.touch()
    told = kernel.run(DONE).text
    name = f"cell In[{begun.number}]"
    assert told.startswith(f"{name} (--nowait) has failed: ZeroDivisionError: division by zero")
    assert kernel.run("1").text == "1"
    assert kernel.run("handle").text.startswith("SpmdRun(failed: ZeroDivisionError")
    assert "----> 4 1 / 0" in kernel.run("await handle").text
    kernel.run("%%spmd --nowait -o handle\n1 / 0")  # one that is asked for
    asked = kernel.run("handle.result()")
    assert [output["type"] for output in asked.outputs] == ["display_data", "error"]
    again = kernel.run("handle.result()")
    assert [output["type"] for output in again.outputs] == ["error"]
    assert kernel.run("2").text == "2"


def test_a_cell_waits_for_the_one_in_the_background_and_says_so(
    kernel: Kernel, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    begun = kernel.run(f"%%spmd --nowait -o handle\n{until_there(go)}\ndist.barrier()\n39")
    name = f"cell In[{begun.number}]"
    stopped = kernel.run("%%spmd\nnever = 1", meanwhile=[(says(name), kernel.press_stop)])
    assert f"interrupted while it waited for {name}" in stopped.errors[0]["evalue"]
    assert kernel.run("handle.done(), handle").text == "(False, SpmdRun(running))"
    waits = kernel.run(
        "%%spmd\ndist.barrier()\nprint('second')", meanwhile=[(says(name), go.touch)]
    )
    assert waits.text == f"gpupool: waiting for {name} to end…\n[0, 1] second"
    assert kernel.run("handle.done(), handle").text == "(True, SpmdRun(done))"
    assert kernel.run("(await handle)[0]").text.endswith("39")
    assert kernel.run("handle.result() is handle.result()").text == "True"


def test_stopping_the_pool_ends_what_runs_and_what_waits_and_stop_does_not_end_that(
    kernel: Kernel, tmp_path: Path
) -> None:
    engines = "[*__import__('gpupool').current_pool().status().pids.values()]"
    pids = ast.literal_eval(kernel.run(engines).text)
    kernel.run("%%spmd --nowait -o runs\nimport time\ntime.sleep(60)")
    kernel.run("%%spmd --nowait -o waits\nimport time\ntime.sleep(60)")
    begun = tmp_path / "begun"

    def press() -> None:
        # while it runs: one that meets ipykernel between a cell and its reply costs the reply
        if any(map(psutil.pid_exists, pids)):
            kernel.press_stop()

    step = (lambda cell: begun.exists(), press)
    stopped = kernel.run(f"{touch(begun)}\n%gpupool stop", meanwhile=[step])
    if "Pool stopped." not in stopped.text:  # pressed before it had begun: nothing has happened
        assert ast.literal_eval(kernel.run(engines).text) == pids
        stopped = kernel.run("%gpupool stop")
    assert (stopped.text.splitlines()[0], stopped.errors) == ("Pool stopped.", [])
    assert not any(map(psutil.pid_exists, pids))
    assert "the pool was stopped" in kernel.run("runs.result()").error_text
    assert "this pool was stopped" in kernel.run("waits.result()").error_text
