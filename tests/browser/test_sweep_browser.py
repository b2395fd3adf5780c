"""A sweep in a real page: its table while it runs, its Interrupt button, and what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from tests.browser.accessible import grave_faults
from tests.browser.looks import save_look

if TYPE_CHECKING:
    from tests.browser.lab import Lab
    from tests.browser.page import Browser

pytestmark = [pytest.mark.browser, pytest.mark.long]

START = "%load_ext gpupool\n%gpupool start --cpu -n 2"
SWEEP = """import gpupool, time
def objective(params):
    for step in range(1, 31):
        gpupool.report(step, accuracy=1 - 1 / (step + params["width"]))
    assert params["width"] != 32, "<b>no</b>"
    time.sleep(0 if params["width"] < 256 else 600)
    return 1 - 1 / (30 + params["width"])
result = gpupool.sweep(objective, {"width": [16, 32, 64, 128, 256, 512]}, sampler="grid",
                       metric="accuracy", direction="maximize", name="digits")"""
OUTPUT = ".jp-OutputArea-output"


def test_a_sweep_is_interrupted_and_saved(lab: Lab, browser: Browser, screenshots: Path) -> None:
    page = browser.open(lab, lab.lend_kernel(lab.write("sweep.ipynb", [START, SWEEP])))
    page.run_cell(0)
    page.cell(0).get_by_role("button", name="Interrupt").wait_for(timeout=60_000)
    page.wait_idle()
    page.run_cell(1)
    page.wait_text(1, "digits: 4 of 6 trials")
    rows = page.cell(1).get_by_role("region", name="Trials").locator("tbody tr")
    assert [rows.count(), rows.filter(has_text="running").count()] == [6, 2]
    assert "<b>no</b>" in rows.filter(has_text="failed").inner_text()
    for dark in (True, False):
        page.use_dark_theme(dark)
        save_look(page, page.cell(1).locator(OUTPUT).first, screenshots, "sweep", dark, 1200)
        assert not grave_faults(page, OUTPUT)
    page.cell(1).get_by_role("button", name="Interrupt", exact=True).click()
    page.wait_text(1, "digits: 6 of 6 trials, stopped")
    page.wait_idle()
    page.save()
    saved = nbformat.read(lab.path("sweep.ipynb"), 4)  # type: ignore[no-untyped-call]
    still = browser.show(saved.cells[1].outputs[0]["data"]["text/html"], scripts=False)
    assert "128" in still.locator("tbody tr", has_text="best").inner_text()
    assert [still.locator(found).count() for found in ("tbody tr", "button")] == [6, 0]
