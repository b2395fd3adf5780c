"""What a page does not lose: reloads, a second view, a dead rank, a notebook without its kernel."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser.trainings import SETUP, wait_for_points

if TYPE_CHECKING:
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
    "%spmd os.getpid()",
    "run = slowly(wait=False)",
    "run.stop(); result = run.result()",
    "result = slowly()",
    "print(result.stopped_by, type(result.model).__name__)",
    "result = slowly()",
    "%spmd rank + 100",
]
PIDS, RETURNED, STOP, BLOCKING, KEPT, DYING, NEXT = range(1, 8)
# Points of all views, in one frame of the page.
POINTS = """() => [...document.querySelectorAll('.gpm')]
    .filter(view => view.offsetParent).map(view => view.querySelectorAll('canvas')[1])
    .map(canvas => Number(canvas.dataset.points))"""
IN_STEP = f"""(least) => {{
    const points = ({POINTS})();
    return points.length === 2 && points[0] === points[1] && points[0] > least;
}}"""


@pytest.fixture(scope="module")
def page(shared_lab: Lab, shared_browser: Browser) -> Iterator[Page]:
    """A notebook with a pool: its tests follow each other."""
    yield shared_browser.begin(shared_lab, "life.ipynb", CELLS)
    shared_browser.close_pages()
    shared_lab.shut_kernels_down()


def points(page: Page) -> list[int]:
    """How many points each view of a training shows."""
    found: list[int] = page.raw.evaluate(POINTS)
    return found


def test_two_views_of_a_training_stay_in_step_and_a_reload_restores_it_all(page: Page) -> None:
    page.run_cell(RETURNED)
    wait_for_points(page, page.cell(RETURNED))
    page.js(f"nb.content.activeCellIndex = {RETURNED};")
    page.js("app.commands.execute('notebook:create-output-view');")
    for _ in range(3):
        page.raw.wait_for_function(IN_STEP, arg=points(page)[0], timeout=60_000)
    before = points(page)[0]
    page.save()
    page.reload()
    monitor = wait_for_points(page, page.cell(RETURNED))
    assert points(page)[-1] >= before  # one point a step: there are few enough
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
    wait_for_points(page, page.cell(BLOCKING))
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


def test_a_rank_killed_under_the_monitor_is_told_in_its_place_and_the_next_cell_runs(
    page: Page,
) -> None:
    page.run_cell(PIDS)
    page.wait_idle()
    page.wait_text(PIDS, re.compile(r"\[1\]\s+\d+"))
    # now: what is scrolled away has no text
    last = [int(word) for word in page.text(PIDS).split() if word.isdigit()][-1]
    page.run_cell(DYING)
    wait_for_points(page, page.cell(DYING))
    os.kill(last, signal.SIGKILL)
    still = page.cell(DYING).locator(".gpupool-training")
    still.wait_for(timeout=60_000)
    assert "rank 1" in still.inner_text()
    assert "SIGKILL" in still.inner_text()
    page.run_cell(NEXT)
    page.wait_idle()
    page.wait_text(NEXT, "101")


def test_a_saved_notebook_shows_its_pictures_without_a_kernel(page: Page) -> None:
    page.save()
    page.shut_kernel_down()
    page.reopen_without_kernel("life.ipynb")
    for index in (RETURNED, BLOCKING, DYING):
        cell = page.cell(index)
        cell.scroll_into_view_if_needed()
        still = cell.locator(".gpupool-training")
        still.wait_for(timeout=60_000)
        assert still.locator("svg, img").count() >= 1
        for words in ("Error displaying widget", "Loading widget"):
            assert cell.get_by_text(words).count() == 0
