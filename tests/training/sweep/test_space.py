"""What a sweep may choose from."""

from __future__ import annotations

import math
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from gpupool import OptionsError
from gpupool.training.sweep.space import distributions, grid, log

MIXED = [64, "wide", None, 0.5, True]
GOOD = [
    (MIXED, CategoricalDistribution(MIXED)),
    (range(2, 6), IntDistribution(2, 5)),
    (range(2, 8, 2), IntDistribution(2, 6, step=2)),
    (range(6, 0, -2), IntDistribution(2, 6, step=2)),
    ((0, 0.5), FloatDistribution(0.0, 0.5)),
    (log(1, 8), FloatDistribution(1.0, 8.0, log=True)),
]
BAD = [[], range(3, 3), 3, "adam", (0.5, 0.0), (1.0, 2.0, 3.0), ("a", 1.0), [[64, 64]], [print]]


@pytest.mark.parametrize(("values", "distribution"), GOOD)
def test_lists_are_categories_and_ranges_are_numbers(values: Any, distribution: Any) -> None:
    assert distributions({"x": values}) == {"x": distribution}


@pytest.mark.parametrize("space", [{}, None, [1, 2], *({"x": values} for values in BAD)])
def test_anything_else_is_refused(space: Any) -> None:
    with pytest.raises(OptionsError, match="space"):
        distributions(space)


@pytest.mark.parametrize("ends", [(0, 1), (1, 1), (2, 1), (1, math.inf), ("a", 1), (1, None)])
def test_a_log_scale_has_two_ends_above_0(ends: tuple[Any, Any]) -> None:
    with pytest.raises(OptionsError):
        log(*ends)


def test_a_grid_has_all_combinations() -> None:
    num, rows = grid({"a": [1, None], "b": range(2)})
    assert num == 4
    assert list(rows) == [{"a": a, "b": b} for a in (1, None) for b in (0, 1)]
