"""What a sweep may choose from: lists, ranges, also on a log scale. Runs on the client."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gpupool.core.errors import OptionsError
from gpupool.core.options import checks

_KINDS = "give a list of values, a range of whole numbers, (low, high) or gpupool.log(low, high)"


class LogRange(NamedTuple):
    """Numbers that are drawn on a log scale: see `log`."""

    low: float
    high: float


def log(low: float, high: float) -> LogRange:
    """A range for a sweep: between 1e-5 and 1e-4 lie as many trials as between 1e-2 and 1e-1."""
    for name, value in (("low", low), ("high", high)):
        checks.number()(name, value)
    if not 0 < low < high < math.inf:
        raise OptionsError(f"gpupool.log({low:g}, {high:g}): 0 < low < high is needed.")
    return LogRange(float(low), float(high))


def distributions(space: Any) -> dict[str, Any]:
    """The space as Optuna knows it. OptionsError: part of it is nothing to choose from."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(space, Mapping) or not space:
        raise OptionsError(f"space={space!r}: write {{'width': [64, 128]}}; for a name {_KINDS}.")
    found: dict[str, Any] = {}
    for name, values in space.items():
        if isinstance(values, tuple) and _is_interval(values):
            low, high = values
            found[name] = FloatDistribution(low, high, log=isinstance(values, LogRange))
        elif not isinstance(values, list | range) or not values:
            raise OptionsError(f"space[{name!r}]={values!r} is nothing to choose from: {_KINDS}.")
        elif isinstance(values, range):
            found[name] = IntDistribution(min(values), max(values), step=abs(values.step))
        elif all(isinstance(value, str | int | float | None) for value in values):
            found[name] = CategoricalDistribution(values)
        else:
            raise OptionsError(f"space[{name!r}]={values!r}: give words or numbers for its values.")
    return found


def _is_interval(values: tuple[Any, ...]) -> bool:
    return (
        len(values) == 2
        and all(isinstance(one, int | float) and math.isfinite(one) for one in values)
        and values[0] < values[1]
    )


def grid(space: Mapping[str, Any]) -> tuple[int, Iterator[dict[str, Any]]]:
    """How many combinations of values there are, and each of them."""
    if endless := [name for name, values in space.items() if isinstance(values, tuple)]:
        raise OptionsError(f"sampler='grid' tries all values: give a list for {endless[0]!r}.")
    rows = itertools.product(*space.values())
    return math.prod(map(len, space.values())), (dict(zip(space, row, strict=True)) for row in rows)
