"""What the ranks show, as a user of a notebook sees it: a real kernel and real ranks."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from tests.notebook.kernel import Cell, Kernel

START = "%load_ext gpupool\n%gpupool start -n 2 --cpu"
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    """A kernel with a pool of two ranks, and what the tests display with."""
    assert clean_kernel.run(START).status == "ok"
    cell = "%%spmd\nimport sys, time, threading\nfrom IPython.display import HTML, display"
    clean_kernel.run(cell)
    return clean_kernel


def late_displays(kernel: Kernel, wanted: str, timeout_s: float = 10.0) -> list[dict[str, Any]]:
    """Displays of cells that are over, until one whose text has `wanted` in it."""
    found, deadline = [], time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        message = kernel.client.get_iopub_msg(timeout=timeout_s)
        if "display_data" in message["msg_type"]:
            found.append(message)
            if wanted in message["content"]["data"].get("text/plain", ""):
                return found
    raise AssertionError(f"{wanted!r} did not come; these did: {found}")


def cell_of(cell: Cell) -> list[str]:
    return [kind for _, kind, _ in cell.messages if kind not in ("status", "execute_input")]


# ---- values ----------------------------------------------------------------------------------


def test_the_value_is_shown_once_and_kept(kernel: Kernel) -> None:
    cell = kernel.run("%%spmd\nprint('said')\nrank * 2")
    assert cell_of(cell) == ["display_data"]
    assert cell.text == "[0, 1] said\n[0] 0\n[1] 2"
    assert kernel.run("_[1], _.text(0)").text == "(2, 'said\\n')"
    number = next(c["execution_count"] for _, kind, c in cell.messages if kind == "execute_input")
    again = kernel.run(f"Out[{number}]")
    assert cell_of(again) == ["execute_result"]
    assert again.text == cell.text
    assert "2 ranks" in again.html
    assert kernel.run(f"[Out[{number}]]").text.startswith("[SpmdResult(2 ranks, ")


def test_a_cell_without_output_shows_nothing_and_is_kept(kernel: Kernel) -> None:
    assert kernel.run("%%spmd\nx = 1").outputs == []
    assert re.fullmatch(r"2 ranks · ✓ 2 ok · \d+ ms", kernel.run("_").text)


@pytest.mark.parametrize("cell", ["%%spmd -o r\nrank;", "%%spmd -o r --view quiet\nrank"])
def test_a_value_can_be_hidden(kernel: Kernel, cell: str) -> None:
    assert kernel.run(cell).outputs == []
    assert kernel.run("r[1], _[1]").text == "(1, 1)"


def test_an_expression_shows_what_is_printed_and_its_value_once_each(kernel: Kernel) -> None:
    cell = kernel.run("%spmd print('said') or rank")
    assert cell_of(cell) == ["display_data", "execute_result"]
    assert cell.text == "[0, 1] said\n[0] 0\n[1] 1"
    assert kernel.run("x = %spmd rank").outputs == []
    assert kernel.run("x").text == "[0] 0\n[1] 1"


def test_rich_values_are_in_the_picture(kernel: Kernel) -> None:
    cell = kernel.run("%%spmd\nHTML(f'<table><tr><td>{rank}</td></tr></table>')")
    assert cell_of(cell) == ["display_data"]
    assert cell.html.count("<table") == 2
    assert cell.html.count('type="radio"') == 3
    assert kernel.run("_").html.count("<table") == 2


# ---- while it runs ---------------------------------------------------------------------------


def test_a_flood_is_bounded_and_its_end_is_right(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%spmd\ns = 'x' * 99\nfor i in range(1_000_000):\n    print(s)\nprint('last', rank)",
        timeout_s=150,
    )
    assert cell.status == "ok"
    assert sum(len(str(content)) for _, _, content in cell.messages) < 1_000_000
    assert "last 0" in cell.text
    assert "lines left out: _.text(0) ...]" in cell.text
    assert kernel.run("_.text(1)[-7:]").text == "'last 1\\n'"


def test_equal_lines_of_the_ranks_are_one_while_the_cell_runs(kernel: Kernel) -> None:
    cell = kernel.run("%%spmd\nfor i in range(4):\n    print('step', i)\n    time.sleep(0.3)")
    live = [c["data"]["text/plain"] for _, kind, c in cell.messages if "display_data" in kind]
    assert "[0, 1] step 0" in live[0]
    assert len(live) >= 3


def test_a_display_is_updated_in_its_place_while_the_cell_runs(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%spmd -t 0\nh = display(HTML('<b>first</b>'), display_id=True)\ntime.sleep(0.6)\n"
        "h.update(HTML('<b>second</b>'))\ntime.sleep(0.6)"
    )
    live = [c["data"]["text/html"] for _, kind, c in cell.messages if "display_data" in kind]
    assert "<b>first</b>" in live[0]
    assert "<b>second</b>" in live[-2]
    assert "first" not in cell.html
    assert cell.html.count("<b>second</b>") == 1


def test_output_that_is_cleared_is_gone(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%spmd\nfrom IPython.display import clear_output\nfor i in range(5):\n"
        "    clear_output(wait=True)\n    print('frame', i)\n    time.sleep(0.1)"
    )
    assert cell.text == "[0, 1] frame 4"
    assert kernel.run("_.text(0)").text == "'frame 4\\n'"


def test_figures_that_cannot_stand_in_html_are_displayed_beside_it(kernel: Kernel) -> None:
    cell = kernel.run("%%spmd\ndisplay({'application/json': {'a': 1}}, raw=True)")
    assert any("application/json" in output["data"] for output in cell.outputs)
    assert "[0, 1]" in cell.text


# ---- widgets ---------------------------------------------------------------------------------


def test_widgets_of_ranks_live_in_the_notebook(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%spmd -o shown\nimport ipywidgets\nslider = ipywidgets.IntSlider(value=rank)\n"
        "slider.observe(lambda change: print('changed to', change['new']), 'value')\n"
        "display(slider)"
    )
    models = [o["data"][WIDGET]["model_id"] for o in cell.outputs if WIDGET in o["data"]]
    opened = {c["comm_id"] for _, kind, c in cell.messages if kind == "comm_open"}
    assert len(models) == 2
    assert set(models) <= opened
    names = [o["data"]["text/plain"] for o in cell.outputs if WIDGET not in o["data"]]
    assert sorted(names) == ["[0]", "[1]"]
    before = {o["data"]["text/plain"]: o["data"][WIDGET]["model_id"] for o in cell.outputs[1::2]}
    moved = before["IntSlider(value=1)"]
    message = kernel.client.session.msg(  # as a front end does when the user moves it
        "comm_msg", {"comm_id": moved, "data": {"method": "update", "state": {"value": 42}}}
    )
    kernel.client.shell_channel.send(message)
    (*_, last) = late_displays(kernel, "changed to 42")
    assert last["content"]["data"]["text/plain"] == "[1] changed to 42"
    assert kernel.run("%spmd slider.value").text == "[0] 0\n[1] 42"
    assert kernel.run("shown.text(1)").text == "'changed to 42\\n'"


def test_bars_made_of_widgets_end_as_text(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%spmd\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(4)): time.sleep(0.05)\n"
        "for _ in tqdm(range(4), leave=False): pass"
    )
    assert "comm_open" in cell_of(cell)
    shown = [output["data"] for output in cell.outputs]
    assert not any(WIDGET in data for data in shown)
    (text,) = [data["text/plain"] for data in shown if data["text/plain"]]
    assert re.match(r"\[0, 1\] 100%\|█{10}\| 4/4 \[", text)
    assert text.count("100%") == 1


def test_bars_in_terminal_style_end_in_their_last_state(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%spmd\nfrom tqdm import tqdm as bar\nfor _ in bar(range(12)): time.sleep(0.1)\n"
        "print('done')"
    )
    live = [c["data"]["text/plain"] for _, kind, c in cell.messages if "display_data" in kind]
    assert any("(rank 1 alike)" in text for text in live)
    first, second = cell.text.splitlines()
    assert re.match(r"\[0, 1\] 100%\|█+\| 12/12 \[", first)
    assert second.split() == ["done"]


# ---- late and failing ------------------------------------------------------------------------

LATE = "%%spmd -o mine\ndef late():\n    time.sleep(1)\n    print('late', rank)\n{}"


@pytest.mark.parametrize("said", ["", "print('at once')\n"])
def test_late_text_appears_under_its_own_cell(kernel: Kernel, said: str) -> None:
    begun = kernel.run(LATE.format(said + "threading.Thread(target=late).start()"))
    other = kernel.run("%%spmd\nprint('other')")
    assert "late" not in begun.text + other.text
    (*_, last) = late_displays(kernel, "late 1")
    assert "late 0" in last["content"]["data"]["text/plain"]
    shown = [c for _, kind, c in begun.messages if kind == "display_data"]
    if shown:  # a display of the cell is changed, wherever the message says it comes from
        assert last["content"]["transient"] == shown[0]["transient"]
    else:  # a display is added to the cell
        request = next(c for _, kind, c in begun.messages if kind == "execute_input")
        assert request["execution_count"] > 0
    assert kernel.run("mine.text(1).splitlines()[-1]").text == "'late 1'"
    assert "late" not in kernel.run("%%spmd\nprint('next')").text


def test_a_failing_cell_shows_what_was_said_and_who_was_freed(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%spmd\nprint('before')\nif rank == 1:\n    raise ValueError('bad <row>')\ndist.barrier()"
    )
    assert [output["type"] for output in cell.outputs] == ["display_data", "error"]
    first, freed = re.findall(r"<details.*?</details>", cell.html, re.DOTALL)[:2]
    assert "<details open>" in first
    assert "ValueError" in first
    assert "bad &lt;row&gt;" in first
    assert re.search(r"freed from barrier #\d+ \(Cell In\[\d+\], line 5\)", freed)
    assert "<details open>" not in freed
    assert cell.text.startswith("[0, 1] before\nrank 1:\n")
    assert "raise ValueError('bad <row>')" not in cell.error_text  # once is enough


CAUGHT = """try:
    get_ipython().run_cell_magic('spmd', '', '1 / 0')
except Exception as error:
    caught = error"""


def test_an_error_that_a_cell_has_caught_is_whole_in_another_cell(kernel: Kernel) -> None:
    assert "ZeroDivisionError" in kernel.run(CAUGHT).text
    for _ in range(2):
        assert "----> 2 1 / 0" in kernel.run("raise caught").error_text


def test_an_error_of_the_users_that_comes_from_ours_shows_no_frames_of_ours(kernel: Kernel) -> None:
    text = kernel.run(CAUGHT + "\n    raise RuntimeError('mine') from error").error_text
    assert "RuntimeError: mine" in text
    assert "magics.py" not in text
    assert "execution.py" not in text


def test_naming_a_result_as_ipython_does_anyway_leaves_its_names_alone(kernel: Kernel) -> None:
    kernel.run("%%spmd -o _\nrank + 5")
    assert kernel.run("_[1]").text == "6"
    kernel.run("'another'")
    assert kernel.run("_").text == "'another'"


NOTICED = """
import threading, gpupool
from gpupool.notebook.spmd_view import make_view
from gpupool.spmd.cell import SpmdRun
def noticed(source, *notices, unwaited=""):
    pool = gpupool.current_pool()
    view = make_view("auto", (0, 1), pool.send_comm, unwaited=unwaited)
    for n, text in enumerate(notices):
        threading.Timer(0.3 + 0.8 * n, view.notice, [text]).start()
    return SpmdRun(pool, source, (0, 1), view)
"""


def test_a_notice_stands_below_the_tail_until_it_is_over(kernel: Kernel) -> None:
    kernel.run(NOTICED)
    cell = kernel.run("_ = noticed('import time; time.sleep(2.5)', 'a <hang>', 'b', None).result()")
    shown = [m["data"] for _, kind, m in cell.messages if "display_data" in kind]
    with_a, with_b = (
        [n for n, data in enumerate(shown) if word in data["text/html"]]
        for word in ("a &lt;hang&gt;", ">b<")
    )
    assert 0 <= with_a[0] < with_b[0]
    assert shown[with_a[0]]["text/plain"] == "running\ngpupool: a <hang>"
    assert not {*with_a} & {*with_b}
    assert "gpupool:" not in cell.text


def test_a_notice_of_a_cell_in_the_background_stands_under_that_cell(kernel: Kernel) -> None:
    kernel.run(NOTICED)
    started = "run = noticed('import time; time.sleep(3)', 'a hang', unwaited='x'); import time"
    cell = kernel.run(f"{started}; time.sleep(1)")
    assert cell.text == "gpupool: a hang"
    assert "border-left" in cell.html
    waiting = kernel.run("_ = run.result()")
    assert "running\ngpupool: a hang" in [
        m["data"]["text/plain"] for _, kind, m in waiting.messages if "display_data" in kind
    ]
    assert "hang" not in waiting.text
