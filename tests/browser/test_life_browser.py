"""What a page does not lose: reloads, a notebook without its kernel."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser.lab import SETUP

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.lab import Lab
    from tests.browser.page import Browser, Page

pytestmark = pytest.mark.browser

SLOW = """
import os, time
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return len(data)
    def __getitem__(self, index):
        time.sleep(0.01)  # of 800 points and more some are left out
        return data[index]
def slowly(**more):
    return gpupool.train(torch.nn.Linear(16, 4), Slow(), options=options, **more)
"""
CELLS = [
    SETUP + SLOW,
    "run = slowly(wait=False)",
    "run.stop(); result = run.result()",
    "result = slowly()",
    "print(result.stopped_by, type(result.model).__name__)",
    "print('kernel', os.getpid())",
    "result = slowly()",
]
RETURNED, STOP, BLOCKING, KEPT, KERNEL, LAST = range(1, 7)


@pytest.fixture(scope="module")
def page(shared_lab: Lab, shared_browser: Browser) -> Iterator[Page]:
    """A notebook with a pool: its tests follow each other."""
    yield shared_browser.begin(shared_lab, "life.ipynb", CELLS)
    shared_browser.close_pages()
    shared_lab.shut_kernels_down()


def points(monitor: Locator) -> int:
    return int(monitor.locator("canvas").nth(1).get_attribute("data-points") or 0)


def test_a_reload_restores_a_training_that_can_be_stopped_then(page: Page) -> None:
    page.run_cell(RETURNED)
    before = points(page.wait_for_points(RETURNED))
    page.save()
    page.reload()
    monitor = page.wait_for_points(RETURNED)
    assert points(monitor) >= before  # one point a step: there are few enough
    assert monitor.get_by_role("button", name="Stop").is_enabled()
    page.run_cell(STOP)
    page.wait_idle()
    still = page.cell(RETURNED).locator(".gpupool-training")
    still.wait_for(timeout=60_000)
    assert still.inner_text().startswith("Stopped after step ")


def test_a_page_reloaded_while_a_cell_blocks_can_stop_it_and_has_its_picture_then(
    page: Page,
) -> None:
    page.run_cell(BLOCKING)
    page.wait_for_points(BLOCKING)
    page.save()
    page.reload()
    # A page that is new learns of models from the kernel, which is busy: the file has its picture.
    cell = page.cell(BLOCKING)
    cell.locator(".gpm").wait_for(timeout=60_000)
    assert cell.get_by_text("Loading widget").count() == 0
    page.interrupt()
    still = cell.locator(".gpupool-training")
    still.wait_for(timeout=60_000)
    assert still.inner_text().startswith("Stopped after step ")
    page.run_cell(KEPT)
    page.wait_idle()
    page.wait_text(KEPT, "user Linear")
    assert page.text(KEPT) == "user Linear"


def test_the_picture_of_a_kernel_that_is_killed_says_so_and_a_saved_notebook_has_all(
    page: Page,
) -> None:
    page.run_cell(KERNEL)
    page.wait_text(KERNEL, re.compile(r"kernel \d+"))
    pid = int(page.text(KERNEL).split()[-1])
    page.run_cell(LAST)
    page.wait_for_points(LAST)
    os.kill(pid, signal.SIGKILL)
    page.raw.locator(".jp-Dialog .jp-mod-accept").click(timeout=60_000)  # the front end says so too
    page.cell(LAST).locator(".gpm", has_text="The kernel stopped at step").wait_for(timeout=60_000)

    page.save()
    page.shut_kernel_down()
    page.reopen_without_kernel("life.ipynb")
    for index, said in ((RETURNED, ""), (BLOCKING, ""), (LAST, "The kernel stopped")):
        cell = page.cell(index)
        cell.scroll_into_view_if_needed()
        still = cell.locator(".gpm" if said else ".gpupool-training", has_text=said)
        still.wait_for(timeout=60_000)
        assert still.locator("svg, img, canvas").count() >= 1
        assert cell.locator("[data-press=stop]").count() == 0
        for words in ("Error displaying widget", "Loading widget"):
            assert cell.get_by_text(words).count() == 0
