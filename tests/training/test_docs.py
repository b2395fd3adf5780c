"""Every row of docs/training.md: options that are accepted, functions that are there."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

import gpupool
from demo import options_page
from gpupool import TrainingOptions

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
TABLES = [table.splitlines() for table in PAGE.read_text().split("\n\n") if table.startswith("| ")]
OPTIONS, FUNCTIONS = (
    [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]
    for table in TABLES
)


@pytest.mark.parametrize("row", OPTIONS, ids=[row[0][:40] for row in OPTIONS])
def test_an_option_is_accepted(row: list[str]) -> None:
    if row[1].startswith("nothing"):
        return
    names = {"TrainingOptions": TrainingOptions, "torch": torch, "partial": partial}
    options = eval(f"TrainingOptions({row[1].strip('`')})", names)
    assert isinstance(options, TrainingOptions)


@pytest.mark.parametrize("row", FUNCTIONS, ids=[row[0][:40] for row in FUNCTIONS])
def test_a_function_is_there(row: list[str]) -> None:
    [name] = set(re.findall(r"gpupool\.(\w+)\(", row[1]))
    assert callable(getattr(gpupool, name))


def test_the_page_of_the_options_is_that_of_their_docstrings() -> None:
    assert options_page.PAGE.read_text() == options_page.text(), "run python -m demo.options_page"
