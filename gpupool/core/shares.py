"""How a batch is cut into one share per rank. Pure; runs anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

from gpupool.core.errors import OptionsError


@lru_cache(maxsize=1024)
def bounds(size: int, load: tuple[float, ...]) -> tuple[int, ...]:
    """Where each rank's share of `size` samples begins, and after the last rank `size`.

    Each boundary is where the loads before it say, rounded down; computed in fractions, so that
    ranks of equal load, written in whatever unit, get what they would get without loads.

    >>> bounds(10, (2, 1, 0, 1))
    (0, 5, 7, 7, 10)
    """
    exact = [Fraction(share) for share in load]
    if not exact or min(exact) < 0 or not sum(exact):
        raise OptionsError(f"rank_load={load}: must not be negative, and one must be above 0.")
    total = sum(exact)
    return (0, *(int(size * so_far / total) for so_far in accumulate(exact)))


def share_sizes(size: int, load: Sequence[float], num_parts: int = 1) -> list[int]:
    """How many of `size` samples each rank has; with equal loads they differ by at most 1.

    `num_parts`: into how many parts they are cut before, of each of which each rank has a share.
    """
    cuts = [size * part // num_parts for part in range(num_parts + 1)]
    edges = [bounds(end - begin, tuple(load)) for begin, end in pairwise(cuts)]
    of_parts = [[end - begin for begin, end in pairwise(part)] for part in edges]
    return [sum(of_rank) for of_rank in zip(*of_parts, strict=True)]
