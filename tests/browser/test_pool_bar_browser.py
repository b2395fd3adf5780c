"""The bar of a pool in real front ends: its buttons pressed, reloaded, saved and opened again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.looks import assert_looks_well

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.lab import Lab
    from tests.browser.page import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.long]

START = "%load_ext gpupool\n%gpupool start --cpu -n 2"
BLOCK = "%%spmd\nimport time\ntime.sleep(600)"
LAST_PID = ".gpb-details table:first-of-type tbody tr:last-child td:last-child"


def bar_in(page: Page, index: int) -> Locator:
    return page.cell(index).locator(".gpupool-bar")


def wait_until(page: Page, index: int, state: str) -> None:
    # a locator, since an element is another one after the bar has been drawn anew
    bar_in(page, index).locator(".gpb-state", has_text=state).wait_for(timeout=60_000)


def tab_to(page: Page, name: str) -> None:
    page.raw.keyboard.press("Shift+Tab")
    focused = page.raw.locator(":focus-visible")
    assert (focused.inner_text(), focused.evaluate("e => e.tagName")) == (name, "BUTTON")


def test_the_buttons_work_while_a_cell_blocks_and_are_not_saved(lab: Lab, browser: Browser) -> None:
    page = browser.begin(lab, "bar.ipynb", [START, BLOCK, BLOCK], app="notebook")
    interrupt = bar_in(page, 0).get_by_role("button", name="Interrupt")
    interrupt.wait_for(timeout=60_000)
    assert interrupt.is_disabled()  # nothing runs
    assert "shuts down after 30 min idle" in bar_in(page, 0).inner_text()

    page.run_cell(1)
    wait_until(page, 0, "busy")
    keyboard = page.raw.keyboard
    bar_in(page, 0).locator("summary").focus()
    keyboard.press("Space")
    bar_in(page, 0).locator(
        ".gpb-details table"
    ).first.wait_for()  # unfolded, and nothing else has moved
    assert not page.js("return nb.content.mode === 'edit';")
    assert_looks_well(page, bar_in(page, 0), ".gpupool-bar")
    bar_in(page, 0).locator("summary").focus()
    tab_to(page, "Shut down")
    tab_to(page, "Interrupt")
    keyboard.press("Enter")
    page.wait_idle(timeout_s=60)
    page.wait_text(1, "2 interrupted")
    wait_until(page, 0, "idle")
    assert interrupt.is_disabled()

    page.run_cell(2)
    wait_until(page, 0, "busy")
    bar_in(page, 0).get_by_role("button", name="Shut down").click()
    page.wait_idle(timeout_s=60)
    wait_until(page, 0, "stopped")
    assert bar_in(page, 0).get_by_role("button").count() == 0
    assert "shut down with the button of its bar" in bar_in(page, 0).inner_text()
    page.wait_text(2, "stopped")

    page.save()
    page.shut_kernel_down()
    page.raw.close()
    again = browser.open(lab, "bar.ipynb", app="notebook")
    assert bar_in(again, 0).locator(".gpb-state").inner_text() == "stopped"
    assert bar_in(again, 0).locator("button").count() == 0
    assert "Error displaying widget" not in again.text(0)


def test_a_reload_brings_the_buttons_back_and_a_kernel_that_is_gone_is_told(
    lab: Lab, browser: Browser
) -> None:
    page = browser.begin(lab, "bar_reload.ipynb", [START, "%gpupool restart 1"])
    stop = bar_in(page, 0).get_by_role("button", name="Shut down")
    stop.wait_for(timeout=60_000)
    page.save()
    page.reload()
    stop.wait_for(timeout=60_000)
    page.wait_opened()
    page.run_cell(1)
    page.wait_idle()
    pid = bar_in(page, 1).locator(LAST_PID).text_content()
    bar_in(page, 0).locator(LAST_PID, has_text=pid).wait_for(state="attached")  # folded

    page.js("await nb.context.sessionContext.session.kernel.restart();")
    for index in (0, 1):
        wait_until(page, index, "stopped")
        assert bar_in(page, index).get_by_role("button").count() == 0
    over = bar_in(page, 0).inner_text()
    assert "The kernel of this notebook has ended" in over
    assert "shuts down" not in over
