"""A confusion matrix that is switched and sorted, in JupyterLab."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.accessible import grave_faults

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.browser.lab import Lab
    from tests.browser.page import Browser

pytestmark = [pytest.mark.browser, pytest.mark.long]

MATRIX = """
import gpupool, numpy as np
%load_ext gpupool
gpupool.ConfusionMatrix(np.array([[8, 2, 0], [0, 5, 5], [1, 0, 3]]), ("zebra", "<b>cat", "mouse"))
"""


def numbers(cell: Locator) -> list[list[str]]:
    rows = cell.locator("tbody tr").all()
    return [row.locator("td").all_inner_texts() for row in rows]


def names(cell: Locator) -> tuple[list[str], list[str]]:
    """Those of the columns and of the rows."""
    tops = [one.get_attribute("title") for one in cell.locator("thead th[title]").all()]
    sides = [one.get_attribute("title") for one in cell.locator("tbody th[title]").all()]
    return [str(one) for one in tops], [str(one) for one in sides]


def test_tables_answer_in_the_page(lab: Lab, browser: Browser) -> None:
    page = browser.open(lab, lab.write("tables.ipynb", [MATRIX]))
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
