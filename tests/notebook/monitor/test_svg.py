"""Axes show what there is: long plans, good and bad losses, shares."""

from __future__ import annotations

import math

import pytest

from gpupool.notebook.monitor.svg import fitted_end, nice_axis, step_axis, tick_label, value_axis


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
    assert list(step_axis(0, 900).ticks) == [0, 200, 400, 600, 800]
    assert list(step_axis(0, 3).ticks) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 2.4, "0 0.5 1 1.5 2 2.5"),
        (0, 6e-5, "0 2e-5 4e-5 6e-5"),
        (-3, 1, "-3 -2 -1 0 1"),
        (50, 50, "50 52 54 56 58 60"),
    ],
)
def test_axes_have_round_ticks(low: float, high: float, labels: str) -> None:
    axis = nice_axis(low, high)
    assert " ".join(map(tick_label, axis.ticks)) == labels
    assert axis.low <= low <= high <= axis.high


FALLING = [2.3 * math.exp(-n / 100) + 0.2 for n in range(500)]
PEAK = [2.3, 2.2, 250.0] + [2.0 * 0.99**n for n in range(200)]


@pytest.mark.parametrize(
    ("values", "low", "high", "is_log"),
    [
        ([], 0, 1, False),
        ([0.5], 0, 0.5, False),
        (FALLING, 0, 2.5, False),
        ([98.5, 99.6], 98.5, 99.75, False),  # from 0 it would be flat
        ([*FALLING, 9.0, -9.0], -10, 10, False),  # one that does not stand alone
        ([*FALLING, 15.0], 0, 2.5, False),
        ([*FALLING, -15.0], 0, 2.5, False),
        (PEAK, 2.0 * 0.99**199 / 1.1, 275, True),
        ([*FALLING, 1e300], min(FALLING) / 1.1, 2.75, True),
    ],
)
def test_what_is_far_off_lies_beyond_and_a_peak_has_a_logarithmic_axis(
    values: list[float], low: float, high: float, is_log: bool
) -> None:
    axis = value_axis(values)
    assert (axis.low, axis.high) == (pytest.approx(low), pytest.approx(high))
    assert axis.is_log == is_log
    assert 2 <= len(axis.ticks) <= 7
