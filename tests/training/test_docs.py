"""Every row of docs/training.md: options that are accepted, functions that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import gpupool
from demo import options_page
from gpupool import OptionsError, TrainingOptions
from gpupool.core.options import other_names
from tests.support.raising import raises

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
TABLES = [table.splitlines() for table in PAGE.read_text().split("\n\n") if table.startswith("| ")]
OPTIONS, FUNCTIONS = (
    [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]
    for table in TABLES
)


@pytest.mark.parametrize("row", OPTIONS, ids=[row[0][:40] for row in OPTIONS])
def test_an_option_is_accepted(row: list[str]) -> None:
    names = {"TrainingOptions": TrainingOptions, "torch": torch}
    options = eval(f"TrainingOptions({row[1].strip('`')})", names)
    assert isinstance(options, TrainingOptions)


@pytest.mark.parametrize("row", FUNCTIONS, ids=[row[0][:40] for row in FUNCTIONS])
def test_a_function_is_there(row: list[str]) -> None:
    [name] = set(re.findall(r"gpupool\.(\w+)\(", row[1]))
    assert callable(getattr(gpupool, name))


def test_the_page_of_the_options_is_that_of_their_docstrings() -> None:
    assert options_page.PAGE.read_text() == options_page.text(), "run python -m demo.options_page"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\b([A-Z]\w+)=", PAGE.read_text()))))
def test_the_name_that_matlab_has_is_answered_with_ours(name: str) -> None:
    if name in ("WeightL2Factor", "WeightLearnRateFactor", "BiasLearnRateFactor", "NumClasses"):
        return  # of layers and functions, not of trainingOptions
    with raises(OptionsError, "no option", name, shown=repr(other_names.NAMES[name])):
        TrainingOptions(**{name: 1})
