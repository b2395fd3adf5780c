"""What `%%spmd` cells and a sweep show in a real page: buttons, edges, colours, what is saved."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
import pytest

from tests.browser.looks import assert_looks_well

if TYPE_CHECKING:
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
SWEEP = """import gpupool, time
def objective(params):
    for step in range(1, 31):
        gpupool.report(step, accuracy=1 - 1 / (step + params["width"]))
    assert params["width"] != 32, "<b>no</b>"
    time.sleep(0 if params["width"] < 128 else 600)
    return 1 - 1 / (30 + params["width"])
result = gpupool.sweep(objective, {"width": [16, 32, 64, 128, 256, 512]}, sampler="grid",
                       metric="accuracy", direction="maximize", name="digits")"""
OUTPUT = ".jp-OutputArea-output"
EDGES = """cell => [...cell.querySelectorAll('[style*="border-left:3px"]')]
    .map(block => getComputedStyle(block).borderLeftColor)"""
FOCUSED = "() => document.activeElement?.closest('[data-part=interrupt]')"
AMBER = "rgb(191, 135, 0)"


def colour(page: Page, index: int, words: str, of: str) -> str:
    found = page.cell(index).locator("pre span", has_text=re.compile(f"^{words}$")).last
    return str(found.evaluate("(e, of) => getComputedStyle(e)[of]", of))


def test_cells_as_they_run_and_end(lab: Lab, browser: Browser) -> None:
    page = browser.begin(lab, "cells.ipynb", [START, HANG, LOOKS])
    page.run_cell(1)
    shown = page.cell(1)
    button = shown.get_by_role("button", name="Interrupt", exact=True)
    button.wait_for(timeout=60_000)
    assert shown.get_by_role("img").get_attribute("aria-label") == (
        "[0] in all_reduce; [1] running; [2] done"
    )
    places = [row.locator("td").all_inner_texts() for row in shown.locator("tbody tr").all()]
    assert [[*place[:2], place[2].partition(", ")[2]] for place in places] == [
        ["0", "in all_reduce", "line 4"],
        ["1", "running", "line 6"],
        ["2", "has already finished the cell", ""],
    ]
    assert shown.evaluate(EDGES) == [AMBER]
    assert_looks_well(page, shown.locator(".jp-OutputArea"), OUTPUT)
    button.focus()
    page.raw.wait_for_function(
        "old => !old.isConnected", arg=button.element_handle(), timeout=10_000
    )
    page.raw.wait_for_function(FOCUSED, timeout=10_000)
    page.raw.keyboard.press("Enter")  # it has been drawn again, and has kept the focus
    page.wait_idle()
    page.wait_text(1, "2 interrupted")
    assert shown.locator("button.gpl-button").count() == 0
    assert "Hang:" not in page.text(1)

    page.run_cell(2)
    page.wait_text(2, "Out[")
    assert page.cell(2).evaluate(EDGES).count(AMBER) == 1
    assert colour(page, 2, "ground", "backgroundColor") != "rgba(0, 0, 0, 0)"
    assert len({colour(page, 2, words, "color") for words in ("ground", "orange")}) == 2
    assert page.text(2).endswith("[0] 0\n[1] 2\n[2] 4")
    assert_looks_well(page, page.cell(2).locator(".jp-OutputArea"), OUTPUT)


def test_a_sweep_is_interrupted_and_saved(lab: Lab, browser: Browser) -> None:
    page = browser.begin(lab, "sweep.ipynb", [START, SWEEP])
    page.run_cell(1)
    page.wait_text(1, "digits: 3 of 6 trials")
    rows = page.cell(1).get_by_role("region", name="Trials").locator("tbody tr")
    assert [rows.count(), rows.filter(has_text="running").count()] == [6, 3]
    assert "<b>no</b>" in rows.filter(has_text="failed").inner_text()
    assert_looks_well(page, page.cell(1).locator(OUTPUT).first, OUTPUT, may_scroll=True)
    page.cell(1).get_by_role("button", name="Interrupt", exact=True).click()
    page.wait_text(1, "digits: 6 of 6 trials, stopped")
    page.wait_idle()
    page.save()
    saved = nbformat.read(lab.path("sweep.ipynb"), 4)  # type: ignore[no-untyped-call]
    still = browser.show(saved.cells[1].outputs[0]["data"]["text/html"], scripts=False)
    assert "64" in still.locator("tbody tr", has_text="best").inner_text()
    assert [still.locator(found).count() for found in ("tbody tr", "button")] == [6, 0]
