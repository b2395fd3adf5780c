"""The live monitor in a real JupyterLab and a real browser, its Stop button pressed by hand."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

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
        ['.gpm-status', '.gpm-remaining', 'button:not(.gpm-stop)', '.gpm-tables summary',
            '.gpm-tables th', '.gpm-tables td', '.gpm-ranks thead th', '.gpm-ranks tbody th',
            '.gpm-ranks td'].map(one => {
            const style = getComputedStyle(view.querySelector(one));
            return ['fontSize', 'fontWeight', 'color', 'borderColor', 'padding', 'textAlign'].map(
                name => style[name]);
        }),
        getComputedStyle(view.querySelector('.gpm-ranks')).borderLeftColor,
    ];
}"""
HAS_ITS_COLOUR = """canvas => {
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    const hex = getComputedStyle(canvas).getPropertyValue('--gpm-loss').trim();
    const [r, g, b] = [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
    for (let i = 0; i < data.length; i += 4)
        if (data[i] === r && data[i + 1] === g && data[i + 2] === b && data[i + 3] === 255)
            return true;
    return false;
}"""


def assert_accessible(page: Page, selector: str) -> None:
    """Nothing serious for axe-core, in either theme; the page is left light."""
    pytest.importorskip("axe_playwright_python", reason="axe-core is not installed")
    for dark in (True, False):
        page.use_dark_theme(dark)
        assert not grave_faults(page, selector)


def colour_of(page: Page, view: Locator, name: str) -> tuple[int, ...]:
    """A colour of the theme, as the style sheet names it."""
    found: str = view.evaluate("(e, name) => getComputedStyle(e).getPropertyValue(name)", name)
    return tuple(bytes.fromhex(found.strip().removeprefix("#")))


def saved_plot(page: Page, view: Locator, folder: Path, theme: str) -> Image.Image:
    """What Save plot gives."""
    with page.raw.expect_download() as saving:
        view.get_by_role("button", name="Save plot").click()
    assert saving.value.suggested_filename.endswith(".png")
    data = Path(saving.value.path()).read_bytes()
    (folder / f"saved_plot_{theme}.png").write_bytes(data)
    picture = Image.open(io.BytesIO(data))
    assert picture.format == "PNG"
    return picture.convert("RGB")


def assert_has_all(page: Page, view: Locator, picture: Image.Image) -> None:
    """Curves of their colours, each in its own half, words, and a legend of both below."""
    accuracy, loss = (colour_of(page, view, f"--gpm-{name}") for name in ("accuracy", "loss"))
    width, height = picture.size
    strips = 3 * (4 * 10 + 22)  # of four ranks
    assert (width, height) == (1800, 2 * (2 * 20 + 2 * 26 + 2 * 286 + strips))
    tops = {"title": 0, "accuracy": 92, "loss": 664, "strips": 1236}
    tops |= {"legend": height - 80, "": height}
    counted = {}
    for name, below in itertools.pairwise(tops):
        part = picture.crop((0, tops[name], width, tops[below]))
        counted[name] = {c: n for n, c in part.getcolors(part.width * part.height)}
    ground = picture.getpixel((2, 2))
    assert min(counted["accuracy"].get(accuracy, 0), counted["loss"].get(loss, 0)) > 500
    assert not counted["accuracy"].get(loss)
    assert not counted["loss"].get(accuracy)
    for name in ("title", "strips", "legend"):
        assert len(counted[name]) > 20, f"no words in the {name}"  # of all shades of their edges
    assert min(counted["legend"].get(colour, 0) for colour in (accuracy, loss)) > 20
    light = page.raw.evaluate("document.body.dataset.jpThemeLight") == "true"
    assert (sum(ground) > 3 * 200) == light


def layout(view: Locator) -> list[Any]:
    """Where the plots are, the strips, tables and ranks, and which tables are folded."""
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
    """Go from Save plot to the button before it with Tab, see where one is, and press Enter."""
    view.get_by_role("button", name="Save plot").focus()
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
    for theme in ("dark", "light"):
        page.use_dark_theme(theme == "dark")
        picture = saved_plot(page, cell.locator(".gpm"), screenshots, theme)
        assert_has_all(page, cell.locator(".gpm"), picture)

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


@pytest.mark.long
def test_a_change_of_the_theme_redraws_what_stands_still(lab: Lab, browser: Browser) -> None:
    name = lab.lend_kernel(lab.write("themes.ipynb", [STANDS_STILL]))
    page = browser.open(lab, name, app="notebook")
    page.run_cell(0)
    canvas = page.cell(0).locator(".gpm canvas").nth(1)
    for dark in (False, True, False, True):
        page.use_dark_theme(dark)
        page.wait_for(HAS_ITS_COLOUR, canvas)
    page.use_dark_theme(False)
