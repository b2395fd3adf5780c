"""Mean and standard deviation of the pixels, as plain data. Runs anywhere; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gpupool.core.errors import OptionsError


class Normalization(NamedTuple):
    """What becomes of images in 0..1: (image - mean) / std, per channel; 1 or 3 numbers each."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(
        cls, mean: float | Sequence[float] | None, std: float | Sequence[float] | None
    ) -> Normalization | None:
        """What a user gave; None for None. Raises OptionsError for what makes no sense."""
        if mean is None and std is None:
            return None
        if mean is None or std is None:
            raise OptionsError("with_normalization needs both mean and std, or None alone")
        means, stds = _numbers("mean", mean), _numbers("std", std)
        if not all(0 <= value <= 1 for value in means) or not all(0 < value <= 1 for value in stds):
            raise OptionsError(
                f"mean={means} and std={stds} are for images in 0..1: a mean is in 0..1, a std "
                "above 0 and at most 1; divide those for 0..255 by 255"
            )
        size = max(len(means), len(stds))
        return cls(means * (size // len(means)), stds * (size // len(stds)))


def _numbers(name: str, value: float | Sequence[float]) -> tuple[float, ...]:
    try:
        given = [value] if isinstance(value, (int, float)) else list(value)
        numbers = tuple(map(float, given))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) not in (1, 3) or not all(map(math.isfinite, numbers)):
        raise OptionsError(f"{name}={value!r} must be a number, or three: one for each channel")
    return numbers
