"""The quick-start in a real JupyterLab: a pool, a cell on the ranks, a training that is stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from demo.run import NOTEBOOK
from tests.servers.s3 import SeaweedServer

if TYPE_CHECKING:
    from tests.browser.lab import Lab
    from tests.browser.page import Browser

# the cells, the live monitor and Stop have quicker tests: test_quickstart, test_stop_browser
pytestmark = [pytest.mark.browser, pytest.mark.long]

POINTS = "canvas => Number(canvas.dataset.points) > 12"


def test_the_quick_start_trains_live_and_the_stop_button_keeps_the_network(
    lab: Lab, browser: Browser, screenshots: Path, s3: SeaweedServer, photos_url: str
) -> None:
    document = nbformat.read(NOTEBOOK, as_version=4)
    sources = [cell.source for cell in document.cells if cell.cell_type == "code"]
    env = {**s3.env, "GPUPOOL_DEMO_URL": photos_url}
    sources = [f"import os\nos.environ.update({env!r})", *sources]
    training = next(i for i, source in enumerate(sources) if "gpupool.train(" in source)
    sources = [source.replace("epochs=4", "epochs=100") for source in sources[: training + 1]]
    sources += ["print(result.stopped_by, len(result.history.steps))", "%gpupool stop"]
    page = browser.open(lab, lab.write("quickstart.ipynb", sources), height=1700)
    for index in range(training):
        page.run_cell(index)
        page.wait_idle()
    page.run_cell(training)
    cell = page.cell(training)
    canvas = cell.locator(".gpm canvas").nth(1)
    canvas.wait_for(timeout=60_000)
    page.wait_for(POINTS, canvas, timeout_s=60)
    page.raw.screenshot(path=screenshots / "quickstart_live.png")
    page.interrupt()
    page.wait_idle()
    page.wait_text(training, "Stopped after step")
    assert cell.locator("svg").count() >= 1
    assert cell.locator("[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    page.run_cell(training + 1)
    page.run_cell(training + 2)
    page.wait_idle()
    page.wait_text(training + 1, "user ")
    page.wait_text(training + 2, "Pool stopped.")
    assert page.text(training + 1).startswith("user ")
    page.raw.screenshot(path=screenshots / "quickstart_stopped.png")
