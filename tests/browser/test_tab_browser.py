"""The tab of a page with monitors: its title and icon, and the notification at the end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser.accessible import grave_faults

if TYPE_CHECKING:
    from tests.browser.lab import App, Lab
    from tests.browser.page import Browser, Page

pytestmark = pytest.mark.browser

SETUP = """
from gpupool.core.wire.events import EndEvent
from gpupool.notebook.monitor.views import WidgetView
from gpupool.training.history import TrainingHistory
from tests.notebook.feed import full_events
shown = {}
def show(name, num_steps):
    history = TrainingHistory()
    for event in full_events(num_epochs=4, num_steps=num_steps):  # of 600 steps
        history.add(event)
    shown[name] = WidgetView(lambda: None, history), history
def end(name, error=""):
    view, history = shown[name]
    if error:
        history.status, history.error = "failed", error
    else:
        history.add(EndEvent("epochs", 600, 7.5))
    view(history)
"""
CELLS = [
    SETUP,
    "show('first', 210)",
    "show('second', 396)",
    "end('first')",
    "end('second', 'the disk is full.')",
    "show('third', 66)",
]
FIRST, SECOND, END_FIRST, END_SECOND, THIRD = range(1, len(CELLS))
# Of each notification that the browser really has made.
NOTED = """() => {
    window.noted = [];
    const Real = window.Notification;
    window.Notification = class extends Real {
        constructor(title, options) {
            super(title, options);
            window.noted.push([title, options.body, Real.permission]);
        }
    };
}"""
TITLE = "words => document.title.startsWith(words)"
OWN = "() => !document.title.includes('▶') && !document.querySelector('link.gpm-icon')"
ICONS = "() => [...document.querySelectorAll('link[rel~=icon]')].map(link => link.href)"


@pytest.fixture
def page(lab: Lab, browser: Browser, app: App) -> Iterator[Page]:
    """A notebook in a page that may notify; the browser forgets the choice after it."""
    opened = browser.open(lab, lab.write(f"tab_{app}.ipynb", CELLS), app=app)
    opened.raw.context.grant_permissions(["notifications"])
    opened.raw.evaluate(NOTED)
    opened.run_cell(0)
    opened.wait_idle()
    yield opened
    opened.raw.evaluate("() => localStorage.removeItem('gpupool-notify')")
    opened.raw.context.clear_permissions()


def starts_with(page: Page, words: str) -> None:
    page.raw.wait_for_function(TITLE, arg=words, timeout=60_000)


def press_notify(page: Page, index: int) -> None:
    page.cell(index).get_by_role("button", name="Notify").click(timeout=60_000)


@pytest.mark.parametrize("app", ["lab", pytest.param("notebook", marks=pytest.mark.long)])
def test_title_icon_and_notification_of_trainings(page: Page, app: App) -> None:
    page.run_cell(FIRST)
    button = page.cell(FIRST).get_by_role("button", name="Notify")
    button.wait_for(timeout=60_000)
    assert button.get_attribute("aria-pressed") == "false"
    assert page.raw.evaluate(OWN)  # unasked nothing changes
    button.focus()
    page.raw.keyboard.press("Enter")
    starts_with(page, "▶ 35 % · ")
    assert button.get_attribute("aria-pressed") == "true"
    assert page.raw.evaluate(ICONS)[-1].startswith("data:image/svg+xml,")
    page.raw.evaluate("() => { document.title = document.title.slice(8); }")  # as front ends do
    starts_with(page, "▶ 35 % · ")
    page.run_cell(SECOND)  # of both the one that has more to do
    pressed = page.cell(SECOND).locator(".gpm-notify[aria-pressed=true]")
    pressed.wait_for(timeout=60_000)
    starts_with(page, "▶ 35 % · ")
    if app == "lab":
        pytest.importorskip("axe_playwright_python", reason="axe-core is not installed")
        assert not grave_faults(page, ".gpm")

    page.run_cell(END_FIRST)
    starts_with(page, "▶ 66 % · ")
    page.run_cell(END_SECOND)
    page.raw.wait_for_function(OWN, timeout=60_000)
    noted = "() => window.noted.length === 2"
    page.raw.wait_for_function(noted, timeout=60_000)
    (first, name, permission), (second, *_) = page.raw.evaluate("() => window.noted")
    assert re.match("Finished: 4 epochs in ", first)
    assert second == "Failed: the disk is full."
    assert (name, permission) == (f"tab_{app}.ipynb", "granted")

    page.run_cell(THIRD)  # the choice is remembered
    starts_with(page, "▶ 11 % · ")
    press_notify(page, THIRD)
    page.raw.wait_for_function(OWN, timeout=60_000)
    press_notify(page, THIRD)
    starts_with(page, "▶ 11 % · ")
    page.js("await nb.context.sessionContext.session.kernel.restart();")
    page.raw.wait_for_function(OWN, timeout=60_000)
    page.raw.wait_for_function("() => window.noted.length === 3", timeout=60_000)
    assert "The kernel stopped at step 66" in page.raw.evaluate("() => window.noted[2][0]")


@pytest.mark.parametrize("app", ["lab"])
def test_a_closed_notebook_gives_the_tab_back_and_a_refusal_is_said(page: Page, app: App) -> None:
    page.raw.context.clear_permissions()
    page.run_cell(FIRST)
    press_notify(page, FIRST)
    starts_with(page, "▶ 35 % · ")
    hint = page.cell(FIRST).locator(".gpm-hint")
    hint.filter(has_text="The browser allows this page no notifications.").wait_for(timeout=60_000)
    page.run_cell(END_FIRST)
    page.raw.wait_for_function(OWN, timeout=60_000)
    page.run_cell(SECOND)
    starts_with(page, "▶ 66 % · ")
    page.js("nb.dispose();")
    page.raw.wait_for_function(OWN, timeout=60_000)
