"""What `%%spmd` cells show in a real page: a hang with its button, edges, colours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.accessible import grave_faults
from tests.browser.looks import save_looks

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.lab import Lab
    from tests.browser.page import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.long]

START = "%load_ext gpupool\n%gpupool start --cpu -n 3 --hang-after 2s"
HANG = """%%spmd
import time
if rank == 0:
    dist.all_reduce(torch.ones(1))
elif rank == 1:
    time.sleep(600)"""
LOOKS = r"""%%spmd
print('device cpu')
print('rows', 6244 + (rank == 2))
print('\x1b[44mground\x1b[0m \x1b[38;5;208morange\x1b[0m')
rank * 2"""
EDGES = """cell => [...cell.querySelectorAll('[style*="border-left:3px"]')]
    .map(block => getComputedStyle(block).borderLeftColor)"""
FOCUSED = "() => document.activeElement?.closest('[class^=gpupool-interrupt]')"
AMBER = "rgb(191, 135, 0)"


def hang(page: Page, index: int) -> Locator:
    """The Interrupt button of the notice of a cell that hangs."""
    page.run_cell(index)
    button: Locator = page.cell(index).get_by_role("button", name="Interrupt", exact=True)
    button.wait_for(timeout=60_000)
    return button


def ends_by_user(page: Page, index: int) -> None:
    page.wait_idle()
    page.wait_text(index, "2 interrupted")
    assert page.cell(index).locator("button.gpb-button").count() == 0
    assert "Hang:" not in page.text(index)


def colour(page: Page, index: int, words: str, of: str) -> str:
    found = page.cell(index).locator("pre span", has_text=re.compile(f"^{words}$")).last
    return str(found.evaluate("(e, of) => getComputedStyle(e)[of]", of))


def test_cells_as_they_run_and_end(lab: Lab, browser: Browser, screenshots: Path) -> None:
    lab.use_subshells(False)  # so that the kernel hears no press while a cell runs
    name = lab.lend_kernel(lab.write("cells.ipynb", [START, HANG, LOOKS]))
    page = browser.open(lab, name)
    page.run_cell(0)
    page.cell(0).get_by_role("button", name="Interrupt").wait_for(timeout=60_000)
    page.wait_idle()

    button = hang(page, 1)
    shown = page.cell(1)
    assert shown.get_by_role("img").get_attribute("aria-label") == (
        "[0] in all_reduce; [1] running; [2] done"
    )
    places = [row.locator("td").all_inner_texts() for row in shown.locator("tbody tr").all()]
    assert [place[:2] for place in places] == [
        ["0", "in all_reduce"],
        ["1", "running"],
        ["2", "has already finished the cell"],
    ]
    assert shown.evaluate(EDGES) == [AMBER]
    assert not grave_faults(page, ".jp-OutputArea-output")
    save_looks(page, shown.locator(".jp-OutputArea"), screenshots, "cell_hangs")
    button.click()  # the page presses the notebook's own, a second later
    ends_by_user(page, 1)

    page.run_cell(2)
    page.wait_text(2, "Out[")
    edges = page.cell(2).evaluate(EDGES)
    assert edges.count(AMBER) == 1
    assert colour(page, 2, "ground", "backgroundColor") != "rgba(0, 0, 0, 0)"
    inks = {colour(page, 2, words, "color") for words in ("ground", "orange")}
    assert len(inks) == 2
    assert page.text(2).endswith("[0] 0\n[1] 2\n[2] 4")
    save_looks(page, page.cell(2).locator(".jp-OutputArea"), screenshots, "cell_differs")

    page.save()
    page.raw.close()

    lab.use_subshells(True)
    again = browser.open(lab, name, app="notebook")
    again.cell(0).locator(".gpb-buttons button").first.wait_for(timeout=60_000)
    button = hang(again, 1)
    button.focus()
    again.raw.wait_for_function(
        "old => !old.isConnected", arg=button.element_handle(), timeout=10_000
    )
    again.raw.wait_for_function(FOCUSED, timeout=10_000)
    again.raw.keyboard.press("Enter")  # it has been drawn again, and has kept the focus
    ends_by_user(again, 1)
