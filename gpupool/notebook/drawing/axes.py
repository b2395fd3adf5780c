"""Axes that fit what is drawn, with round ends and labelled ticks. Pure; runs on the client.

An axis is {"low", "high", "ticks": [(value, label)]}. That of values has "log", whether equal
factors are equally far apart, and "clipped": the (step, value) of outliers, marked at the edge.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

from gpupool.core.formatting import number

Axis = dict[str, Any]
Points = Sequence[tuple[float, float]]
Band = tuple[int, int, str]

LOG_FROM = 50  # times the median: what has a higher peak cannot be read on a linear axis
MIN_SHARE = 0.05  # the least range of shares: smaller ones would magnify noise
MAX_LABEL_CHARS = 6  # what there is room for beside a plot
MAX_BANDS = 12
MAX_SHARED_BANDS = 8  # their labels are longer
_AHEAD = 1.25  # so much of the steps that are done: the curve has room to grow
_LEAST_STEPS = 10
_ENDS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
_TICKS = 5
_FAR, _FAR_IN_POWERS = 2.0, 3.0  # times the span of all others
_SURE, _FAR_OF_FEW = 20, 50.0  # of fewer points no span is certain
_GROWTH = 1.05


class Drawn(Protocol):
    """What an axis has to know of a line."""

    low: float
    high: float
    count: int

    def points(self) -> list[tuple[int, float]]:
        """What is drawn."""


class FittedAxis:
    """The axis of the values in one plot, fitted again when they have outgrown it.

    Args:
        whole: of shares what stands for all, 100 or 1; 0: the values are none.
        from_zero: whether the axis begins there, as that of a loss does, where that hides nothing.
    """

    def __init__(self, whole: float = 0, *, from_zero: bool = False) -> None:
        self._whole, self._from_zero = whole, from_zero
        self._seen = (math.inf, -math.inf)
        self._count = 0
        self._axis: Axis = share_axis(0, whole, whole) if whole else value_axis([])

    def of(self, lines: Sequence[Drawn], *, exact: bool = False) -> Axis:
        """The axis of these lines; not to be changed. `exact`: they are all there will be."""
        there = [line for line in lines if line.count]
        if not there:
            return self._axis
        low, high = min(line.low for line in there), max(line.high for line in there)
        if self._whole:
            return share_axis(low, high, self._whole)
        count = sum(line.count for line in there)
        # Outliers lie beyond the axis: only what lies beyond them too is new.
        low_end, high_end = self._axis["low"], self._axis["high"]
        is_beyond = low < min(low_end, self._seen[0]) or high > max(high_end, self._seen[1])
        # To sort a thousand points ten times a second would cost more than all the rest.
        if exact or is_beyond or count > _GROWTH * self._count:
            self._seen, self._count = (low, high), count
            points = [point for line in there for point in line.points()]
            self._axis = value_axis(points, from_zero=self._from_zero)
        return self._axis


def value_axis(points: Points, *, from_zero: bool = False) -> Axis:
    """An axis of losses, metrics and other values; see the head of this file.

    It is logarithmic where all are above 0 and the highest is over 50 times their median. A few
    that are far from all others are clipped. One from zero begins there, unless that hides a curve.
    """
    if not points:
        return {**nice_axis(0.0, 1.0), "log": False, "clipped": []}
    values = sorted(value for _, value in points)
    is_log = values[0] > 0 and values[-1] / LOG_FROM > values[len(values) // 2]
    low, high = _bulk([math.log10(value) for value in values] if is_log else values, is_log)
    if is_log:
        axis = log_axis(values[low], values[high])
    else:
        start, end = values[low], values[high]
        hides = 0 < end - start < end / 4  # a curve in the upper quarter is flat
        axis = nice_axis(min(0.0, start) if from_zero and not hides else start, end)
    clipped = [p for p in points if not axis["low"] <= p[1] <= axis["high"]]
    return {**axis, "log": is_log, "clipped": sorted(clipped)}


def _bulk(values: list[float], is_log: bool) -> tuple[int, int]:
    """The places of the lowest and the highest of sorted values that are no outliers."""
    first, last = 0, len(values) - 1
    few = max(len(values) // 100, min(3, len(values) // 3))
    is_sure = is_log or len(values) >= _SURE
    # A decade at least: of values that are nearly equal everything would be far.
    least = 1.0 if is_log else 0.0 if is_sure else abs(values[len(values) // 2])
    far = _FAR_IN_POWERS if is_log else _FAR if is_sure else _FAR_OF_FEW
    for top in range(last, last - few, -1):
        span = max(values[top - 1] - values[0], least)
        if values[top] > values[top - 1] + far * span > values[top - 1]:
            last = top - 1
    for bottom in range(few):
        span = max(values[last] - values[bottom + 1], least)
        if values[bottom] < values[bottom + 1] - far * span < values[bottom + 1]:
            first = bottom + 1
    return first, last


@functools.lru_cache(maxsize=64)
def share_axis(low: float, high: float, whole: float) -> Axis:
    """An axis of shares between 0 and `whole`, of at least 5 %; not to be changed."""
    span = max(high - low, MIN_SHARE * whole)
    start = (low + high - span) / 2
    if low >= 0:
        start = max(start, 0.0)
    if high <= whole:
        start = min(start, whole - span)
    return {**nice_axis(start, start + span), "log": False, "clipped": []}


def nice_step(span: float, count: int) -> float:
    """The smallest 1, 2, 2.5 or 5 times a power of ten that divides `span` in at most `count`."""
    power: float = 10.0 ** math.floor(math.log10(span / count))
    return next(m * power for m in (1, 2, 2.5, 5, 10, 20) if span <= count * m * power * (1 + 1e-9))


# Kept: a live monitor asks many times a second, and the ends change now and then.
@functools.lru_cache(maxsize=64)
def nice_axis(low: float, high: float) -> Axis:
    """An axis that begins and ends on a tick and holds both values; not to be changed."""
    if high <= low:
        high = low + (abs(low) / _TICKS or 1.0)
    step = nice_step(high - low, _TICKS)
    # The small terms: 0.3 / 0.1 is 2.999..., which would add a tick that nobody needs.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Through text: 3 * 0.1 is 0.30000000000000004, and would stand so beside the plot.
    ticks = [float(f"{i * step:.12g}") for i in range(first, last + 1)]
    return {"low": ticks[0], "high": ticks[-1], "ticks": labelled(ticks)}


def log_axis(low: float, high: float) -> Axis:
    """The same for values above 0: equal factors are equally far apart.

    >>> axis = log_axis(0.03, 250)
    >>> axis["low"], axis["high"], [label for _, label in axis["ticks"]]
    (0.02, 500.0, ['0.1', '1', '10', '100'])
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ends = [float(f"{m}e{power}") for power in range(first, last + 1) for m in (1, 2, 5)]
    start = max(end for end in ends if end <= low * (1 + 1e-9))
    stop = min(end for end in ends if end >= high * (1 - 1e-9) and end > start)
    every = math.ceil((last - first) / (_TICKS + 1))
    if math.log10(stop / start) > 2:
        ends = [float(f"1e{power}") for power in range(first, last + 1, every)]
    return {"low": start, "high": stop, "ticks": labelled([e for e in ends if start <= e <= stop])}


def fitted_end(now: int, plan: int, *, is_over: bool) -> int:
    """Where the axis of steps ends: a quarter ahead while there will be more, else at the last.

    A round number, which stays where it is for many steps; never beyond the plan (0: none).

    >>> fitted_end(100, 5000, is_over=False), fitted_end(111, 5000, is_over=True)
    (150, 111)
    """
    if is_over:
        return max(now, 1)
    wanted = max(_AHEAD * now, _LEAST_STEPS)
    power = 10.0 ** math.floor(math.log10(wanted))
    end = round(next(m * power for m in _ENDS if m * power >= wanted * (1 - 1e-9)))
    return min(end, plan) if plan >= max(now, 1) else end


def step_ticks(end: int, start: int = 0) -> list[int]:
    """Half a dozen round numbers of steps; whole ones, as there are no half steps.

    >>> step_ticks(900), step_ticks(3)
    ([0, 200, 400, 600, 800], [0, 1, 2, 3])
    """
    # `ceil` makes 2.5 a 3: no tick stands between two steps.
    size = math.ceil(nice_step(end - start, 6))
    return list(range(math.ceil(start / size) * size, end + 1, size))


@functools.lru_cache(maxsize=16)
def step_axis(end: int, plan: int = 0, per_epoch: int = 0, start: int = 0) -> Axis:
    """The axis of the steps from `start` to `end`; not to be changed, as it is kept.

    It says of how many steps the plan is, and an epoch (0: nobody knows).
    """
    ticks = [(tick, number(tick)) for tick in step_ticks(end, start)]
    return {"low": start, "high": end, "ticks": ticks, "plan": plan, "per_epoch": per_epoch}


@functools.lru_cache(maxsize=16)
def epoch_bands(per_epoch: int, end: int) -> list[Band]:
    """(first step, last step, label) of at most a dozen bands up to `end`; many epochs share one.

    None where nobody knows how long an epoch is, as of a stream. Not to be changed.
    """
    if not per_epoch:
        return []
    num_epochs = math.ceil(end / per_epoch)
    size = 1 if num_epochs <= MAX_BANDS else math.ceil(nice_step(num_epochs, MAX_SHARED_BANDS))
    bands = []
    for first in range(1, num_epochs + 1, size):
        last = min(first + size - 1, num_epochs)
        label = str(first) if first == last else f"{first}–{last}"
        if first == 1:
            label = ("Epoch " if size == 1 else "Epochs ") + label
        bands.append(((first - 1) * per_epoch, min(last * per_epoch, end), label))
    return bands


def labelled(ticks: list[float]) -> list[tuple[float, str]]:
    """Each tick with its number as text."""
    return [(tick, tick_label(tick)) for tick in ticks]


def tick_label(tick: float) -> str:
    """A number that fits beside a plot.

    >>> tick_label(0.0025), tick_label(5000), tick_label(2.5e6), tick_label(-2e-05)
    ('0.0025', '5,000', '2.5e6', '-2e-5')
    """
    label = number(tick) if abs(tick) >= 1000 else f"{tick:g}"
    if "e" not in label and len(label) <= MAX_LABEL_CHARS:
        return label
    # Without "+" and zeros: "2.5e+06" has no room.
    digits, power = f"{tick:.3e}".split("e")
    return f"{float(digits):g}e{int(power)}"
