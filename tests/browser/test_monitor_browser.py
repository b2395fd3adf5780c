"""The live monitor in a real JupyterLab and a real browser, its Stop button pressed by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.looks import assert_looks_well, cut_elements

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.lab import Lab
    from tests.browser.page import Browser, Page

pytestmark = pytest.mark.browser

SETUP = """
import time
from gpupool.notebook.monitor.views import show_training
from tests.notebook.feed import Run
"""
LATER = "status => /epoch [4-9]/.test(status.textContent)"
MANY_POINTS = "canvas => Number(canvas.dataset.points) > 50"
ZOOMED = "canvas => canvas.getAttribute('aria-label').includes('; shown: ')"


def choose(page: Page, view: Locator) -> list[Any]:
    """Zoom, smooth, switch and fold; returns what is chosen then."""
    view.locator("canvas").nth(1).focus()
    page.raw.keyboard.press("+")
    view.get_by_label("Log", exact=True).check()
    view.get_by_role("slider").fill("10")
    view.get_by_text("Progress").click()
    page.wait_for(ZOOMED, view.locator("canvas").nth(1))
    chosen = chosen_in(view)
    assert chosen[1:] == [True, "10", False]
    return chosen


def chosen_in(view: Locator) -> list[Any]:
    """Shown steps, log, smoothing, and whether a table is unfolded."""
    label = view.locator("canvas").nth(1).get_attribute("aria-label") or ""
    return [
        label.partition("; shown: ")[2],
        view.get_by_label("Log", exact=True).is_checked(),
        view.get_by_role("slider").input_value(),
        view.locator("details", has_text="Progress").evaluate("e => e.open"),
    ]


def press_stop_with_keyboard(page: Page, view: Locator) -> None:
    """Go to the button from the plot after it with Tab, see where one is, and press Enter."""
    view.locator("canvas").first.focus()
    page.raw.keyboard.press("Shift+Tab")
    focused = "document.activeElement"
    assert page.raw.evaluate(f"{focused}.textContent").strip().startswith("Stop")
    assert page.raw.evaluate(f"{focused}.matches(':focus-visible')")
    page.raw.keyboard.press("Enter")


def test_a_training_is_drawn_live_stopped_and_left_as_a_still_picture(
    lab: Lab, browser: Browser
) -> None:
    cells = [
        SETUP,
        "run = Run(0.008, ends=False, num_epochs=10, num_steps=1300)\nshow_training(run)",
        "print(run.history.status)",
    ]
    page = browser.open(lab, lab.write("live.ipynb", cells))
    page.run_cell(0)
    page.run_cell(1)
    cell = page.cell(1)
    canvas = cell.locator(".gpm canvas")
    canvas.nth(1).wait_for(timeout=60_000)
    page.wait_idle()  # the cell has returned, the training goes on
    page.wait_for(MANY_POINTS, canvas.nth(1).first)
    page.wait_for(LATER, cell.get_by_role("status"))
    assert "images/s" in cell.locator(".gpm-tables").inner_text()
    assert cell.get_by_role("status").inner_text().startswith("Training: epoch ")
    label = canvas.nth(0).get_attribute("aria-label") or ""
    assert label.startswith("Accuracy at step ")
    assert_looks_well(page, cell.locator(".gpm"), ".gpm")
    page.resize(1400, 420)
    cell.locator(".gpm .gpm-ranks").scroll_into_view_if_needed()
    stop = cell.get_by_role("button", name="Stop")
    page.wait_for("stop => stop.getBoundingClientRect().top > 0", stop)  # it stays in sight
    page.resize(1400, 1500)
    chosen = choose(page, cell.locator(".gpm"))
    press_stop_with_keyboard(page, cell.locator(".gpm"))
    still = cell.locator(".gpupool-training")
    still.locator("canvas").nth(1).wait_for(timeout=60_000)
    assert chosen_in(still) == chosen
    assert cell.locator(".gpm").count() == 0
    assert still.inner_text().startswith("Stopped after step ")
    page.run_cell(2)
    page.wait_idle()
    page.wait_text(2, "stopped")
    assert page.cell(2).locator(".jp-OutputArea-output").inner_text().strip() == "stopped"
    assert cut_elements(still) == []
