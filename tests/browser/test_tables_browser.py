"""A confusion matrix that is switched and sorted, and points saved as a table, in JupyterLab."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.accessible import grave_faults

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.lab import Lab
    from tests.browser.page import Browser, Page

pytestmark = pytest.mark.browser

MATRIX = """
import gpupool, numpy as np
%load_ext gpupool
gpupool.ConfusionMatrix(np.array([[8, 2, 0], [0, 5, 5], [1, 0, 3]]), ("zebra", "<b>cat", "mouse"))
"""
PLOTS = """
from IPython.display import display
from gpupool.notebook.monitor.views import still_picture
from gpupool.notebook.monitor.widget import TrainingMonitor
from gpupool.training.history import TrainingHistory
from tests.notebook.feed import full_events
history = TrainingHistory()
for event in full_events(num_steps=20):
    history.add(event)
display(TrainingMonitor(history=history), raw=False)
history.status = "stopped"
display(still_picture(history), raw=True)
"""


def numbers(cell: Locator) -> list[list[str]]:
    rows = cell.locator("tbody tr").all()
    return [row.locator("td").all_inner_texts() for row in rows]


def names(cell: Locator) -> tuple[list[str], list[str]]:
    """Those of the columns and of the rows."""
    tops = [one.get_attribute("title") for one in cell.locator("thead th[title]").all()]
    sides = [one.get_attribute("title") for one in cell.locator("tbody th[title]").all()]
    return [str(one) for one in tops], [str(one) for one in sides]


def saved_table(page: Page, button: Locator) -> list[dict[str, str]]:
    with page.raw.expect_download() as saving:
        button.click()
    assert saving.value.suggested_filename.endswith(".csv")
    with Path(saving.value.path()).open(newline="") as file:
        return list(csv.DictReader(file))


def test_tables_answer_in_the_page(lab: Lab, browser: Browser) -> None:
    page = browser.open(lab, lab.write("tables.ipynb", [MATRIX, PLOTS]))
    page.run_cell(0)
    page.wait_text(0, "accuracy 66.7 % on 24 samples")
    cell = page.cell(0)
    values, order = cell.get_by_label("Numbers"), cell.get_by_label("Order")
    values.wait_for()
    assert numbers(cell)[0] == ["8", "2", "", "80.0 %"]
    values.select_option("shares")
    assert numbers(cell)[0] == ["80 %", "20 %", "", "80.0 %"]
    order.select_option("by recall")
    assert names(cell) == (["<b>cat", "mouse", "zebra"], ["<b>cat", "mouse", "zebra"])
    assert numbers(cell)[0] == ["50 %", "50 %", "", "50.0 %"]
    order.select_option("by name")
    assert names(cell)[1] == ["<b>cat", "mouse", "zebra"]
    order.select_option("by class")
    values.select_option("counts")
    assert numbers(cell) == [
        ["8", "2", "", "80.0 %"],
        ["", "5", "5", "50.0 %"],
        ["1", "", "3", "75.0 %"],
    ]
    assert not grave_faults(page, ".jp-OutputArea-output")

    page.run_cell(1)
    buttons = page.cell(1).get_by_role("button", name="CSV")
    buttons.nth(1).wait_for()  # of the monitor, and of the picture that stays
    live, still = (saved_table(page, button) for button in buttons.all())
    assert live[0].keys() == still[0].keys()
    # The picture that stays has four digits.
    assert float(live[0]["Loss"]) == pytest.approx(float(still[0]["Loss"]), rel=1e-3)
    assert [row["step"] for row in live] == [row["step"] for row in still]
    assert [row["step"] for row in live] == [str(step) for step in range(1, 21)]
    assert live[0]["Loss mean"] == live[0]["Loss"] != ""
    assert {"Accuracy (%)", "Loss validation"} <= live[0].keys()
