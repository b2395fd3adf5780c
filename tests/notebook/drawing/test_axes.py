"""Axes show what there is: long plans, good and bad losses, shares."""

from __future__ import annotations

import math

import pytest

from gpupool.notebook.drawing.axes import (
    fitted_end,
    log_axis,
    share_axis,
    value_axis,
)


def points(values: list[float]) -> list[tuple[int, float]]:
    return list(enumerate(values, start=1))


def test_the_axis_of_steps_ends_a_quarter_ahead_and_stays_for_many_steps() -> None:
    plan = 100_000
    ends = [fitted_end(now, plan, is_over=False) for now in range(1, plan + 1)]
    assert ends == sorted(ends)
    assert len(set(ends)) < 50
    for now, end in enumerate(ends, start=1):
        assert min(1.25 * now, plan) <= end <= max(10, min(1.75 * now, plan)), now
    assert ends[-1] == plan


@pytest.mark.parametrize(("now", "plan"), [(111, 5000), (1, 5000), (2000, 100_000), (700, 0)])
def test_at_the_end_the_axis_ends_with_the_last_step(now: int, plan: int) -> None:
    assert fitted_end(now, plan, is_over=True) == now
    assert fitted_end(0, plan, is_over=True) == 1


@pytest.mark.parametrize(
    ("low", "high", "ends"),
    [
        (98.5, 99.6, (95, 100)),
        (50.0, 50.0, (47, 53)),
        (0.0, 0.0, (0, 5)),
        (-10.0, 40.0, (-10, 40)),
    ],
)
def test_shares_have_a_range_that_shows_them(
    low: float, high: float, ends: tuple[float, float]
) -> None:
    axis = share_axis(low, high, 100)
    assert (axis["low"], axis["high"]) == ends
    assert 3 <= len(axis["ticks"]) <= 7
    of_one = share_axis(low / 100, high / 100, 1)
    assert math.isclose(of_one["high"], axis["high"] / 100)


def test_a_loss_with_a_high_peak_has_a_logarithmic_axis() -> None:
    values = [2.3, 2.2, 250.0] + [2.0 * 0.99**n for n in range(200)]
    axis = value_axis(points(values), from_zero=True)
    assert axis["log"]
    assert (axis["low"], axis["high"], axis["clipped"]) == (0.2, 500.0, [])
    assert [label for _, label in axis["ticks"]] == ["1", "10", "100"]
    negative = value_axis(points([*values, -0.5]))
    assert not negative["log"]
    assert negative["clipped"] == [(3, 250.0)]


@pytest.mark.parametrize("num", [3, 20, 500])
@pytest.mark.parametrize("huge", [1e31, 1e300])
def test_a_huge_value_flattens_nothing(num: int, huge: float) -> None:
    values = [2.3 * 0.999**n for n in range(num - 1)]
    axis = value_axis(points([*values, huge]), from_zero=True)
    assert axis["clipped"] == [(num, huge)]
    assert axis["high"] <= 5
    negative = value_axis(points([*(-v for v in values), huge]), from_zero=True)
    assert (negative["clipped"], negative["log"]) == ([(num, huge)], False)
    assert -5 <= negative["low"] < negative["high"] <= 5


def test_a_few_far_values_are_clipped_and_an_ordinary_course_is_not() -> None:
    falling = [2.3 * math.exp(-n / 100) + 0.2 for n in range(500)]
    axis = value_axis(points(falling), from_zero=True)
    assert (axis["low"], axis["high"], axis["clipped"], axis["log"]) == (0, 2.5, [], False)
    falling[300] = 9.0
    axis = value_axis(points(falling), from_zero=True)
    assert (axis["high"], axis["clipped"]) == (2.5, [(301, 9.0)])


@pytest.mark.parametrize("low", [1e-300, 0.5, 1e300])
@pytest.mark.parametrize("factor", [1.0, 7.0, 1e9])
def test_logarithmic_axes_hold_their_values_and_have_few_ticks(low: float, factor: float) -> None:
    high = min(low * factor, 1e300)
    axis = log_axis(low, high)
    assert axis["low"] <= low <= high <= axis["high"]
    assert axis["low"] < axis["high"] < math.inf
    assert 2 <= len(axis["ticks"]) <= 8
    assert all(len(label) <= 6 for _, label in axis["ticks"])
