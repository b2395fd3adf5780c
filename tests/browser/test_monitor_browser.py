"""The monitor in a real browser: live and stopped, and what a reader does with plots that stay."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import nbformat
import pytest

from gpupool.core.wire.events import EndEvent, StartEvent, ValidationEvent
from gpupool.notebook.monitor.picture import history_html
from gpupool.training.history import TrainingHistory
from tests.browser.looks import assert_looks_well, cut_elements, grave_faults
from tests.notebook.feed import full_events, history_of

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


# ---- what a reader does ----------------------------------------------------------------------

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\u2028"
STILL = """
from gpupool.notebook.monitor.picture import history_html
from tests.notebook.feed import full_events, history_of
display({"text/html": history_html(history_of(full_events()))}, raw=True)"""


def stopped_history(metric: str) -> TrainingHistory:
    start, *events = full_events(num_steps=400)
    told = [
        replace(one, metrics={metric: 0.5}) if isinstance(one, ValidationEvent) else one
        for one in events
    ]
    assert isinstance(start, StartEvent)
    return history_of([replace(start, metrics=(metric,)), *told, EndEvent("user", 400, 8.0)])


class Plots:
    """The plots in an element, as a reader uses them."""

    def __init__(self, raw: Any, within: str = "body") -> None:
        self.raw, self.root = raw, raw.locator(within).locator(".gpm-plots").first
        self.canvas = self.root.locator("canvas")
        self.canvas.nth(1).wait_for(timeout=60_000)
        raw.wait_for_function("c => c.width !== 300", arg=self.canvas.nth(1).element_handle())

    @property
    def reading(self) -> list[str]:
        found: list[str] = self.root.locator("[aria-live]").locator("div").all_inner_texts()
        return found

    @property
    def shown(self) -> str:
        """What the label of the second plot says of the zoom."""
        return (self.canvas.nth(1).get_attribute("aria-label") or "").partition("; shown: ")[2]

    def at(self, share: float) -> tuple[float, float]:
        """A place in the second plot, this share of its width from its left."""
        self.canvas.nth(1).scroll_into_view_if_needed()
        box = self.canvas.nth(1).bounding_box()
        return box["x"] + 46 + share * (box["width"] - 70), box["y"] + box["height"] / 2

    def drag(self, start: float, end: float) -> None:
        self.raw.mouse.move(*self.at(start))
        self.raw.mouse.down()
        self.raw.mouse.move(*self.at(end), steps=3)
        self.raw.mouse.up()
        self.settle()

    def drawn(self) -> str:
        self.settle()
        found: str = self.canvas.nth(1).evaluate("c => c.toDataURL()")
        return found

    def settle(self) -> None:
        """Until what was asked for is drawn."""
        self.raw.evaluate(
            "() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r(1))))"
        )

    def use(self) -> None:
        for share in itertools.islice(itertools.cycle((0.4, 0.5)), 100):
            self.raw.mouse.move(*self.at(share))  # the front end may still lay the page out
            self.settle()
            if self.reading:
                break
        step, accuracy, loss, *_ = self.reading
        assert step.startswith("Step ")
        assert accuracy.startswith("Accuracy ")
        assert "smooth" in loss
        assert "validation " in loss

        self.raw.mouse.move(0, 0)
        whole = self.drawn()
        self.canvas.nth(1).focus()
        steps = []
        for key in ("ArrowRight", "Shift+ArrowRight", "ArrowLeft"):
            self.raw.keyboard.press(key)
            assert self.drawn() != whole  # the crosshair
            steps.append(int(self.reading[0].split()[1]))
        first, tenth, ninth = steps
        assert 1 <= first < first + 9 <= ninth < tenth
        self.raw.keyboard.press("+")
        self.settle()
        assert self.shown.startswith("steps 0 to ")

        self.drag(0.25, 0.5)
        low, high = (int(part.replace(",", "")) for part in self.shown[6:].split(" to "))
        assert abs(2 * low - high) <= 0.02 * high + 2, "it is from a quarter to a half"
        assert self.root.get_by_role("button", name="Reset zoom").is_visible()
        self.raw.keyboard.press("Escape")
        assert self.drawn() == whole
        assert not self.reading

        log = self.root.get_by_label("Log", exact=True)
        log.check()
        assert self.drawn() != whole
        log.uncheck()
        smoothing = self.root.get_by_role("slider", name="Smoothing")
        assert smoothing.input_value() == "2"
        smoothing.fill("20")
        assert self.drawn() != whole
        smoothing.fill("2")
        assert self.drawn() == whole


@pytest.mark.long
def test_the_page_of_a_stopped_training_answers_twice_and_keeps_to_itself(browser: Browser) -> None:
    html = history_html(stopped_history(HOSTILE))
    raw = browser.show("<body></body>")
    names = raw.evaluate("Object.keys(window)")
    raw.set_content(f"<div id=one>{html}</div><div id=two>{html}</div>")
    both = [Plots(raw, within) for within in ("#one", "#two")]
    both[0].use()
    both[0].raw.mouse.move(*both[0].at(0.2))
    assert not both[1].reading
    assert [len(plots.canvas.all()) for plots in both] == [3, 3]
    assert raw.locator(".gpm-plots").count() == 2
    assert raw.locator("img").count() == 0
    assert HOSTILE[:20] in both[0].root.inner_text()
    assert raw.evaluate("Object.keys(window)") == names
    assert raw.faults == []


@pytest.mark.long
def test_in_jupyterlab_saved_trusted_and_not(lab: Lab, browser: Browser) -> None:
    name = "explore.ipynb"
    page = browser.begin(lab, name, [STILL])
    Plots(page.raw, ".gpupool-training").use()
    assert not grave_faults(page, ".gpupool-training")
    page.save()
    page.reopen_without_kernel(name)
    Plots(page.raw, ".gpupool-training").use()  # its own outputs are trusted

    path = lab.path(name)
    other = path.with_name("explore_foreign.ipynb")
    notebook = nbformat.read(path, 4)  # type: ignore[no-untyped-call]
    notebook.cells[0].source = "# of somebody else"
    notebook.cells[0].outputs[0].data["text/html"] += "<i>changed</i>"
    nbformat.write(notebook, other)  # type: ignore[no-untyped-call]
    page.reopen_without_kernel(other.name)
    image = page.cell(0).locator("img.gpupool-plots")
    image.wait_for(timeout=60_000)
    assert image.bounding_box()["height"] > 300  # type: ignore[index]
    assert page.cell(0).locator("canvas").count() == 0
