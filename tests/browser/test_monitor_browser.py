"""The live monitor in a real JupyterLab and a real browser, its Stop button pressed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.accessible import grave_faults
from tests.browser.looks import save_looks

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
STANDS_STILL = """
from gpupool.notebook.monitor.widget import TrainingMonitor
from gpupool.training.history import TrainingHistory
from tests.notebook.feed import full_events
history, monitor = TrainingHistory(), TrainingMonitor()
display(monitor)
for event in full_events(num_steps=300):
    history.add(event)
monitor.update(history)
"""
ZOOMED = "canvas => canvas.getAttribute('aria-label').includes('; shown: ')"
# The words of the state may need more or less room, so lengths of tables are not compared.
LAYOUT = """view => {
    const place = (e, ends) => {
        const [box, { left, top }] = [e, view].map(one => one.getBoundingClientRect());
        return [box.left - left, ...(ends ? [box.top - top, box.width, box.height] : [])];
    };
    return [
        [...view.querySelectorAll('canvas')].map(e => place(e, true)),
        [...view.querySelectorAll('.gpm-tables details')].map(e => [e.open, ...place(e, false)]),
        ['.gpm-status', '.gpm-remaining', '.gpm-tables summary',
            '.gpm-tables th', '.gpm-tables td', '.gpm-ranks thead th', '.gpm-ranks tbody th',
            '.gpm-ranks td'].map(one => {
            const style = getComputedStyle(view.querySelector(one));
            return ['fontSize', 'fontWeight', 'color', 'borderColor', 'padding', 'textAlign'].map(
                name => style[name]);
        }),
        getComputedStyle(view.querySelector('.gpm-ranks')).borderLeftColor,
    ];
}"""


def assert_accessible(page: Page, selector: str) -> None:
    """Nothing serious for axe-core, in either theme; the page is left light."""
    pytest.importorskip("axe_playwright_python", reason="axe-core is not installed")
    for dark in (True, False):
        page.use_dark_theme(dark)
        assert not grave_faults(page, selector)


def layout(view: Locator) -> list[Any]:
    """Where the plots are, the tables and ranks, and which tables are folded."""
    found: list[Any] = view.evaluate(LAYOUT)
    return found


def choose(page: Page, view: Locator) -> list[Any]:
    """Zoom, smooth, switch and fold; returns what is chosen then."""
    view.locator("canvas").nth(1).focus()
    page.raw.keyboard.press("+")
    view.get_by_label("Log", exact=True).check()
    view.get_by_role("slider").fill("10")
    view.get_by_text("Training cycle").click()
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
        view.locator("details", has_text="Training cycle").evaluate("e => e.open"),
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
    lab: Lab, browser: Browser, screenshots: Path
) -> None:
    cells = [
        SETUP,
        "run = Run(0.008, ends=False, num_epochs=10, num_steps=1300)\nshow_training(run)",
        "print(run.history.status)",
    ]
    page = browser.open(lab, lab.lend_kernel(lab.write("live.ipynb", cells)))
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
    save_looks(page, cell.locator(".gpm"), screenshots, "monitor_live")
    assert_accessible(page, ".gpm")
    chosen = choose(page, cell.locator(".gpm"))
    before = layout(cell.locator(".gpm"))
    press_stop_with_keyboard(page, cell.locator(".gpm"))
    still = cell.locator(".gpupool-training")
    still.locator("canvas").nth(1).wait_for(timeout=60_000)
    assert layout(still) == before
    assert chosen_in(still) == chosen
    assert cell.locator(".gpm").count() == 0
    assert still.inner_text().startswith("Stopped after step ")
    page.run_cell(2)
    page.wait_idle()
    page.wait_text(2, "stopped")
    assert page.cell(2).locator(".jp-OutputArea-output").inner_text().strip() == "stopped"
    save_looks(page, still, screenshots, "monitor_still")


@pytest.mark.long
def test_times_count_bars_stay_in_forced_colours_and_stop_stays_in_sight(
    lab: Lab, browser: Browser
) -> None:
    name = lab.lend_kernel(lab.write("stands.ipynb", [STANDS_STILL, "1"]))
    page = browser.open(lab, name, width=1400)
    page.run_cell(0)
    monitor = page.cell(0).locator(".gpm")
    figures = monitor.locator("figure")
    figures.nth(1).wait_for(timeout=60_000)
    elapsed = monitor.locator("td[data-label=Elapsed]")
    for _ in range(2):  # no message comes
        before = elapsed.inner_text()
        page.wait_for(f"cell => cell.textContent !== {before!r}", elapsed)
    tops = [figures.nth(index).evaluate("e => e.offsetTop") for index in range(2)]
    assert tops[0] == tops[1]  # side by side
    page.raw.emulate_media(forced_colors="active")
    ground = "e => getComputedStyle(e).backgroundColor"
    for bar in ("td:nth-child(3) i i", "td:nth-child(4) i i", ".gpm-square"):
        assert monitor.locator(bar).first.evaluate(ground) != monitor.evaluate(ground), bar
    page.raw.emulate_media(forced_colors="none")
    page.resize(1400, 420)
    monitor.locator(".gpm-ranks").scroll_into_view_if_needed()
    stop = monitor.get_by_role("button", name="Stop")
    page.wait_for("stop => stop.getBoundingClientRect().top > 0", stop)
