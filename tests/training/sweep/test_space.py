"""What a sweep may choose from."""

from __future__ import annotations

from typing import Any

import pytest
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from gpupool import OptionsError
from gpupool.training.sweep.space import distributions, grid, log


@pytest.mark.parametrize(
    ("values", "distribution"),
    [
        ([64, "wide", None, 0.5, True], CategoricalDistribution([64, "wide", None, 0.5, True])),
        (range(2, 6), IntDistribution(2, 5)),
        (range(2, 8, 2), IntDistribution(2, 6, step=2)),
        (range(6, 0, -2), IntDistribution(2, 6, step=2)),
        (log(1e-5, 1e-1), FloatDistribution(1e-5, 1e-1, log=True)),
        (log(1, 8), FloatDistribution(1.0, 8.0, log=True)),
    ],
)
def test_lists_are_categories_and_ranges_are_numbers(
    values: Any, distribution: BaseDistribution
) -> None:
    assert distributions({"x": values}) == {"x": distribution}


@pytest.mark.parametrize(
    "space",
    [
        {},
        None,
        [1, 2],
        {"x": []},
        {"x": range(3, 3)},
        {"x": 3},
        {"x": "adam"},
        {"x": (0.0, 1.0)},
        {"x": [[64, 64]]},
        {"x": [print]},
    ],
)
def test_anything_else_is_refused(space: Any) -> None:
    with pytest.raises(OptionsError, match="space"):
        distributions(space)


@pytest.mark.parametrize("ends", [(0, 1), (1, 1), (2, 1), (1, float("inf")), ("a", 1), (1, None)])
def test_a_log_scale_has_two_ends_above_0(ends: tuple[Any, Any]) -> None:
    with pytest.raises(OptionsError):
        log(*ends)


def test_a_grid_has_all_combinations() -> None:
    num, rows = grid({"a": [1, None], "b": range(3)})
    found = list(rows)
    assert num == len(found) == 6
    assert found[:3] == [{"a": 1, "b": 0}, {"a": 1, "b": 1}, {"a": 1, "b": 2}]
    with pytest.raises(OptionsError, match="'b'"):
        grid({"a": [1], "b": log(1, 2)})
