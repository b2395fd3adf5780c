"""Axes show what there is: long plans, good and bad losses, shares."""

from __future__ import annotations

import math

import pytest

from gpupool.notebook.drawing.axes import fitted_end, nice_axis, share_axis, value_axis


def points(values: list[float]) -> list[tuple[int, float]]:
    return list(enumerate(values, start=1))


def test_the_axis_of_steps_ends_a_quarter_ahead_and_at_the_end_with_the_last_step() -> None:
    plan = 100_000
    ends = [fitted_end(now, plan, is_over=False) for now in range(1, plan + 1)]
    assert ends == sorted(ends)
    assert len(set(ends)) < 50
    for now, end in enumerate(ends, start=1):
        assert min(1.25 * now, plan) <= end <= max(10, min(1.75 * now, plan)), now
    for now, planned in ((111, 5000), (2000, plan), (700, 0)):
        assert fitted_end(now, planned, is_over=True) == now
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


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 2.4, "0 0.5 1 1.5 2 2.5"),
        (0, 6e-5, "0 2e-5 4e-5 6e-5"),
        (-3, 1, "-3 -2 -1 0 1"),
    ],
)
def test_loss_axes_have_round_ticks(low: float, high: float, labels: str) -> None:
    axis = nice_axis(low, high)
    assert " ".join(label for _, label in axis["ticks"]) == labels
    assert axis["low"] <= low <= high <= axis["high"]


FALLING = [2.3 * math.exp(-n / 100) + 0.2 for n in range(500)]
PEAK = [2.3, 2.2, 250.0] + [2.0 * 0.99**n for n in range(200)]


@pytest.mark.parametrize(
    ("values", "ends", "clipped", "is_log"),
    [
        (FALLING, (0, 2.5), [], False),
        ([*FALLING[:300], 9.0, *FALLING[301:]], (0, 2.5), [(301, 9.0)], False),
        (PEAK, (0.2, 500.0), [], True),
        ([2.3, 2.2, 1e31], (2.0, 5.0), [(3, 1e31)], True),
        ([*FALLING, 1e300], (0.2, 5.0), [(501, 1e300)], True),
    ],
)
def test_what_is_far_off_is_clipped_and_a_peak_has_a_logarithmic_axis(
    values: list[float], ends: tuple[float, float], clipped: list[tuple[int, float]], is_log: bool
) -> None:
    axis = value_axis(points(values), from_zero=True)
    assert (axis["low"], axis["high"]) == ends
    assert (axis["clipped"], axis["log"]) == (clipped, is_log)
    below_zero = value_axis(points([*values, -0.5]))
    assert not below_zero["log"]
