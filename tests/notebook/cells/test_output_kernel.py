"""What the ranks show, as a user of a notebook sees it: a real kernel and real ranks."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from gpupool.notebook.cells.live import REDRAW_EVERY_S
from tests.notebook.kernel import Cell, Kernel, draws
from tests.support.waits import until_there

START = "%load_ext gpupool\n%gpupool start -n 2 --cpu"
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    """A kernel with a pool of two ranks, and what the tests display with."""
    assert clean_kernel.run(START).status == "ok"
    cell = (
        "%%spmd\nimport sys, time, threading, ipywidgets\nfrom IPython.display import HTML, display"
    )
    clean_kernel.run(cell)
    return clean_kernel


def late_displays(kernel: Kernel, *wanted: str, timeout_s: float = 60.0) -> list[dict[str, Any]]:
    """Displays of cells that are over, until one whose text has all that is wanted in it."""
    found, deadline = [], time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        message = kernel.client.get_iopub_msg(timeout=timeout_s)
        if "display_data" in message["msg_type"]:
            found.append(message)
            text = message["content"]["data"].get("text/plain", "")
            if all(words in text for words in wanted):
                return found
    raise AssertionError(f"{wanted!r} did not come; these did: {found}")


def cell_of(cell: Cell) -> list[str]:
    """What it has shown; how often that was drawn anew depends on how long the cell took."""
    others = ("status", "execute_input", "update_display_data")
    return [kind for _, kind, _ in cell.messages if kind not in others]


# ---- values ----------------------------------------------------------------------------------


def test_the_value_is_shown_once_and_kept(kernel: Kernel) -> None:
    cell = kernel.run("%%spmd\nprint('said')\nrank * 2")
    assert cell_of(cell) == ["display_data"]
    number = next(c["execution_count"] for _, kind, c in cell.messages if kind == "execute_input")
    assert cell.text == f"[0, 1] said\nOut[{number}]:\n[0] 0\n[1] 2"
    assert kernel.run("_[1], _.text(0)").text == "(2, 'said\\n')"
    again = kernel.run(f"Out[{number}]")
    assert cell_of(again) == ["execute_result"]
    assert again.text == cell.text
    assert "2 ranks" in again.html
    assert kernel.run(f"[Out[{number}]]").text.startswith("[SpmdResult(2 ranks, ")


def test_an_expression_shows_what_is_printed_and_its_value_once_each(kernel: Kernel) -> None:
    cell = kernel.run("%spmd print('said') or rank")
    assert cell_of(cell) == ["display_data", "execute_result"]
    assert cell.text == "[0, 1] said\n[0] 0\n[1] 1"
    assert kernel.run("x = %spmd rank").outputs == []
    assert kernel.run("x").text == "[0] 0\n[1] 1"


# ---- while it runs ---------------------------------------------------------------------------


def test_a_flood_is_bounded_and_its_end_is_right(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%spmd\ns = 'x' * 99\nfor i in range(200_000):\n    print(s)\nprint('last', rank)",
        timeout_s=150,
    )
    assert cell.status == "ok"
    # each time little, and not too often
    assert max(len(str(content)) for _, _, content in cell.messages) < 200_000
    assert len(cell.drawn) <= cell.elapsed_s / REDRAW_EVERY_S + 2
    assert "last 0" in cell.text
    assert "lines left out: _.text(0) ...]" in cell.text
    assert kernel.run("_.text(1)[-7:]").text == "'last 1\\n'"


def test_a_display_is_updated_in_its_place_while_the_cell_runs(
    kernel: Kernel, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    cell = kernel.run(
        "%%spmd -t 0\nh = display(HTML('<b>first</b>'), display_id=True)\n"
        f"{until_there(first)}\nh.update(HTML('<b>second</b>'))\n{until_there(second)}",
        meanwhile=[(draws("<b>first</b>"), first.touch), (draws("<b>second</b>"), second.touch)],
    )
    assert cell.status == "ok"
    assert "first" not in cell.html
    assert cell.html.count("<b>second</b>") == 1


def test_figures_that_cannot_stand_in_html_are_displayed_beside_it(kernel: Kernel) -> None:
    cell = kernel.run("%%spmd\ndisplay({'application/json': {'a': 1}}, raw=True)")
    assert any("application/json" in output["data"] for output in cell.outputs)
    assert "[0, 1]" in cell.text


# ---- bars ------------------------------------------------------------------------------------


def test_live_displays_of_rich_are_text(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%spmd\nfrom rich.progress import Progress\nwith Progress() as bars:\n"
        "    one, two = bars.add_task('one', total=8), bars.add_task('two', total=4)\n"
        "    for _ in range(8): bars.advance(one); bars.advance(two); time.sleep(0.1)\n"
        "with Progress(transient=True) as bars: bars.add_task('gone')\n"
        "display(ipywidgets.Output())"
    )
    drawn = [c["data"]["text/plain"] for _, kind, c in cell.messages if "display_data" in kind]
    assert any(re.search(r"\[0(, 1)?\] two ━+", text) for text in drawn)  # while it runs
    shown = [output["data"] for output in cell.outputs]
    assert not any(WIDGET in data for data in shown)
    names = re.findall(r"(one|two|gone) ━+ +(\d+)%", cell.text)
    assert {*names} == {("one", "100"), ("two", "100")}


def test_bars_of_tqdm_auto_are_text(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%spmd\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(4)): time.sleep(0.05)\n"
        "for _ in tqdm(range(40), leave=False): time.sleep(0.02)"
    )
    drawn = [c["data"]["text/plain"] for _, kind, c in cell.messages if "display_data" in kind]
    assert any(re.search(r"\[0(, 1)?\] +\d+(%\|.*/40 |(-\d+)? %)", text) for text in drawn)  # live
    shown = [output["data"] for output in cell.outputs]
    assert not any(WIDGET in data for data in shown)
    (text,) = [data["text/plain"] for data in shown if data["text/plain"]]
    # alike, unless one rank has taken much longer
    groups = re.findall(r"^\[([\d, ]+)\] 100%\|█{10}\| 4/4 \[", text, re.MULTILINE)
    assert sorted(groups) in (["0, 1"], ["0", "1"])
    assert text.count("100%") == len(groups)


# ---- late and failing ------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["", "print('at once')\n"])
def test_late_text_appears_under_its_own_cell(kernel: Kernel, said: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    late = f"def late():\n{until_there(go, margin='    ')}\n    print('late', rank)"
    start = "threading.Thread(target=late).start()"
    begun = kernel.run(f"%%spmd -o mine\n{late}\nseen = 1\n{said}{start}")
    assert "late" not in begun.text + kernel.run("seen[0]").text
    go.touch()
    (*_, last) = late_displays(kernel, "late 0", "late 1")
    shown = [c for _, kind, c in begun.messages if kind == "display_data"]
    if shown:  # a display of the cell is changed, wherever the message says it comes from
        assert last["content"]["transient"] == shown[0]["transient"]
    else:  # a display is added to the cell
        request = next(c for _, kind, c in begun.messages if kind == "execute_input")
        assert request["execution_count"] > 0
    assert kernel.run("mine.text(1).splitlines()[-1]").text == "'late 1'"
    assert "late" not in kernel.run("%%spmd\nprint('next')").text


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
