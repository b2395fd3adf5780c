"""The live monitor in a real JupyterLab and a real browser, its Stop button pressed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.lab import Browser, Lab, Page

pytestmark = pytest.mark.browser

SETUP = """
import time
from gpupool.notebook.views import WidgetView, show_training
from tests.notebook.feed import Run
"""
LATER = "status => /epoch [4-9]/.test(status.textContent)"
MANY_POINTS = "canvas => Number(canvas.dataset.points) > 50"


def wait_for(page: Page, condition: str, element: Locator, timeout_s: float = 20) -> None:
    page.raw.wait_for_function(condition, arg=element.element_handle(), timeout=1000 * timeout_s)


def save_looks(page: Page, element: Locator, folder: Path, name: str) -> None:
    """Pictures at both widths and in both themes; the page is left light and wide."""
    for dark in (True, False):
        page.use_dark_theme(dark)
        for width in (700, 1200):
            page.raw.set_viewport_size({"width": width, "height": 1100})
            page.raw.wait_for_timeout(600)  # sizes settle, then a frame is drawn
            theme = "dark" if dark else "light"
            element.screenshot(path=folder / f"{name}_{theme}_{width}.png")


def test_a_training_is_drawn_live_stopped_and_left_as_a_still_picture(
    lab: Lab, browser: Browser, screenshots: Path
) -> None:
    cells = [
        SETUP,
        "run = Run(step_s=0.008, num_epochs=10)\nshow_training(run)",
        "print(run.history.status)",
    ]
    page = browser.open(lab, lab.write("live.ipynb", cells))
    page.run_cell(0)
    page.run_cell(1)
    cell = page.cell(1)
    canvas = cell.locator(".gpm canvas")
    canvas.nth(1).wait_for(timeout=30_000)
    page.wait_idle()  # the cell has returned, the training goes on
    wait_for(page, MANY_POINTS, canvas.nth(1).first)
    wait_for(page, LATER, cell.get_by_role("status"))
    assert "images/s" in cell.locator(".gpm-tables").inner_text()
    assert cell.get_by_role("status").inner_text().startswith("Training: epoch ")
    label = canvas.nth(0).get_attribute("aria-label") or ""
    assert label.startswith("Accuracy at step ")
    save_looks(page, cell.locator(".gpm"), screenshots, "monitor_live")

    cell.get_by_role("button", name="Stop").click()
    still = cell.locator(".gpupool-training")
    still.wait_for(timeout=10_000)
    assert cell.locator(".gpm").count() == 0
    assert still.inner_text().startswith("Stopped after step ")
    page.run_cell(2)
    page.wait_idle()
    assert page.cell(2).locator(".jp-OutputArea-output").inner_text().strip() == "stopped"
    save_looks(page, still, screenshots, "monitor_still")


def test_stop_works_while_the_cell_blocks_and_a_second_view_is_complete(
    lab: Lab, browser: Browser
) -> None:
    cells = [
        SETUP + "run = Run(step_s=0.01)\nview = WidgetView(run.stop)",
        "run.add_listener(view)\nrun.wait()\nprint(run.history.status)",
        "view.monitor",
    ]
    page = browser.open(lab, lab.write("blocking.ipynb", cells))
    page.run_cell(0)
    page.run_cell(1)
    canvas = page.cell(0).locator(".gpm canvas").nth(1)
    canvas.wait_for(timeout=30_000)
    wait_for(page, MANY_POINTS, canvas)
    page.cell(0).get_by_role("button", name="Stop").click()
    page.wait_idle(timeout_s=5)  # 900 steps would take nine seconds
    assert page.cell(1).locator(".jp-OutputArea-output").inner_text().strip() == "stopped"
    page.run_cell(2)
    second = page.cell(2).locator(".gpm")
    wait_for(page, MANY_POINTS, second.locator("canvas").nth(1))
    assert second.get_by_role("status").inner_text().startswith("Stopped after step ")
    assert second.get_by_role("button").count() == 0


def test_a_kernel_that_does_not_hear_the_button_is_told_of(lab: Lab, browser: Browser) -> None:
    cells = [
        SETUP + "from gpupool.notebook.monitor import TrainingMonitor\n"
        # As a front end that does not use subshells: messages wait for the main thread.
        "class Deaf(TrainingMonitor):\n"
        "    def _answer_on_any_shell(self):\n"
        "        if self.comm is not None:\n"
        "            self.comm._reply_subshell_id = None\n"
        "monitor = Deaf(lambda: print('pressed'))\nmonitor",
        "time.sleep(4)",
    ]
    page = browser.open(lab, lab.write("deaf.ipynb", cells))
    page.run_cell(0)
    button = page.cell(0).get_by_role("button", name="Stop")
    button.wait_for(timeout=30_000)
    page.run_cell(1)
    button.click()
    assert page.cell(0).locator(".gpm-stop").inner_text() == "Stopping…"
    hint = page.cell(0).locator(".gpm-hint")
    wait_for(page, "hint => hint.textContent !== ''", hint, timeout_s=3)
    assert hint.inner_text() == "kernel is busy: press the stop button of the notebook"
    page.wait_idle()
    wait_for(page, "hint => hint.textContent === ''", hint)  # the press has arrived after all
