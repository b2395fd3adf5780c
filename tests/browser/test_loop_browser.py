"""The monitor of a loop of one's own: its Stop button, and what is left in the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.looks import save_looks

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.lab import App, Lab
    from tests.browser.page import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.long]

START = "%load_ext gpupool\n%gpupool start --cpu -n 2"
LOOP = """%%spmd
import time
import gpupool
with gpupool.monitor(["loss", "accuracy"], num_steps=100_000, title="Mine") as monitor:
    for step in range(1, 100_001):
        time.sleep(0.02)
        monitor.record(step, loss=1 / step, accuracy=1 - 1 / step)
        if monitor.stop:
            break
step"""
AWAITED = "run = _\nresult = await run"
# What shows how far it is until there is a file of a name.
GOES_ON = """\
import pathlib, time
from gpupool.core.progress import progress
with progress("Listing", total=10_000, unit="files") as bar:
    while not pathlib.Path("{enough}").exists():
        time.sleep(0.05)
        bar.advance()
"""
CELLS = [START, LOOP, LOOP.replace("%%spmd", "%%spmd --nowait"), AWAITED]
CELLS += [GOES_ON.format(enough="here"), "%%spmd\n" + GOES_ON.format(enough="there")]


MANY_POINTS = "canvas:not([data-points='0'], [data-points='1'])"


def stop_in(page: Page, index: int) -> Locator:
    button = page.cell(index).get_by_role("button", name="Stop", exact=True)
    button.wait_for(timeout=60_000)
    return button


def is_stopped(page: Page, index: int) -> None:
    page.wait_idle(timeout_s=60)
    page.wait_text(index, "stopped")
    page.cell(index).locator(".gpm").first.wait_for(state="detached")
    assert "KeyboardInterrupt" not in page.text(index)


# Each drawing is an element of its own.
FARTHER = """([cell, before]) => [...document.querySelectorAll('.jp-NotebookPanel .jp-Cell')[cell]
    .querySelectorAll('progress')].some(bar => bar.value > before)"""


@pytest.mark.parametrize("app", ["lab", pytest.param("notebook", marks=pytest.mark.long)])
def test_stop_of_a_loop_works_while_its_cell_blocks_or_is_awaited(
    lab: Lab, browser: Browser, app: App, screenshots: Path
) -> None:
    name = lab.lend_kernel(lab.write(f"loop_{app}.ipynb", CELLS))
    page = browser.open(lab, name, app=app)
    page.run_cell(0)
    page.wait_idle()
    page.run_cell(1)
    button = stop_in(page, 1)
    assert "press the stop button of the notebook" not in page.text(1)
    if app == "lab":
        save_looks(page, page.cell(1).locator(".gpm").first, screenshots, "loop_running")
    page.cell(1).locator(MANY_POINTS).first.wait_for()
    button.click()
    is_stopped(page, 1)
    if app == "lab":
        left = page.cell(1).locator(".gpupool-training").first
        save_looks(page, left, screenshots, "loop_stopped")

    page.run_cell(2)
    page.wait_idle()
    page.run_cell(3)
    button = stop_in(page, 3)
    button.focus()
    page.raw.keyboard.press("Enter")
    is_stopped(page, 3)
    for index, enough in ((4, "here"), (5, "there")):
        progress_moves_and_goes(page, index, lab.path(enough))
        page.cell(index).screenshot(path=screenshots / f"progress_{app}_{enough}_end.png")
    page.save()
    saved = lab.path(f"loop_{app}.ipynb").read_text()
    assert "application/vnd.jupyter.widget-view+json" not in saved
    assert "<button" not in saved
    assert "<progress value" not in saved  # which a bar has


def progress_moves_and_goes(page: Page, index: int, enough: Path) -> None:
    """A bar of the notebook's, or of the ranks', while its cell blocks; nothing is left of it."""
    page.run_cell(index)
    bar = page.cell(index).locator("progress").first
    bar.wait_for(timeout=60_000)
    before = float(bar.get_attribute("value") or 0)
    page.raw.wait_for_function(FARTHER, arg=[index, before], timeout=60_000)
    enough.touch()
    page.wait_idle()
    enough.unlink()
    bar.wait_for(state="detached")
    assert "Listing" not in page.text(index)
