"""What Shift-Tab and the Tab key show of options and commands in JupyterLab."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.lab import Lab
    from tests.browser.page import Browser, Page

pytestmark = pytest.mark.browser

CELLS = [
    "%load_ext gpupool\nimport gpupool",
    "gpupool.TrainingOptions(",
    'gpupool.TrainingOptions(optimizer="a',
    "%gpupool st",
    "gpupool",
]


def press_in(page: Page, index: int, key: str, shows: str) -> Locator:
    """Press a key at the end of a cell; what then opens."""
    page.cell(index).locator(".cm-content").click()
    page.raw.keyboard.press("Control+End")
    page.raw.keyboard.press(key)
    opened: Locator = page.raw.locator(shows).last
    opened.wait_for()
    return opened


def test_the_keys_that_people_press_for_help_show_options_and_commands(
    lab: Lab, browser: Browser
) -> None:
    page = browser.open(lab, lab.write("help.ipynb", CELLS))
    page.run_cell(0)
    page.wait_idle()
    tip = press_in(page, 1, "Shift+Tab", ".jp-Tooltip")
    text = tip.inner_text()
    for wanted in (
        "optimizer: Literal['sgdm', ",
        "batch_size",
        "learn_rate_factors",
        "How a network is",
    ):
        assert wanted in text
    page.raw.keyboard.press("Escape")
    for index, words in (2, ["adam", "adamw"]), (3, ["status", "start", "stop"]):
        offered = press_in(page, index, "Tab", ".jp-Completer:not(.lm-mod-hidden)")
        found = offered.locator(".jp-Completer-match").all_inner_texts()
        assert set(words) <= {one.strip("\"' ") for one in found}
        page.raw.keyboard.press("Escape")
    text = press_in(page, 4, "Shift+Tab", ".jp-Tooltip").inner_text()
    assert "train a network on all ranks, with a live monitor" in text
    assert "docs/" in text
