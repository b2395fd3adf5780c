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


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([], 0, 1),
        ([0.5], 0, 0.5),
        (FALLING, 0, 2.5),
        ([98.5, 99.6], 98.5, 99.75),  # from 0 it would be flat
        ([*FALLING, 9.0, -9.0], -10, 10),  # one that does not stand alone
        ([*FALLING, 15.0], 0, 2.5),
        ([*FALLING, -15.0], 0, 2.5),
        ([*FALLING, 1e300], 0, 2.5),
    ],
)
def test_what_is_far_off_lies_beyond(values: list[float], low: float, high: float) -> None:
    axis = value_axis(values)
    assert (axis.low, axis.high) == (pytest.approx(low), pytest.approx(high))
    assert 2 <= len(axis.ticks) <= 7
