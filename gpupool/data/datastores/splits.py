"""Which samples go where when a data set is split: pure. Runs anywhere; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import OptionsError
from gpupool.data.reading.shards import Indices, keyed_generator


def split(
    labels: NDArray[Any], classes: Sequence[str], sizes: Sequence[float], seed: int | None
) -> list[Indices]:
    """Each class cut alike: indices for each of `sizes`, and for the rest if any is left; sorted.

    `sizes` are fractions of each class, or whole numbers per class. `seed=None` takes the first of
    each class, a number draws them.
    """
    shown = f"split_each_label({', '.join(map(repr, sizes))})"
    kinds = {isinstance(size, Integral) and not isinstance(size, bool) for size in sizes}
    # Fractions that add up to 1 may come to slightly more as floats.
    fractions_fit = all(0 < size < 1 for size in sizes) and sum(sizes) < 1 + 1e-9
    if len(kinds) != 1 or not (min(sizes) >= 1 if True in kinds else fractions_fit):
        raise OptionsError(
            f"{shown}: give fractions between 0 and 1 that add up to at most 1, or whole numbers "
            "of images per label"
        )
    if not len(classes):
        raise OptionsError("these images have no labels; use subset")
    pieces = []
    for index, name in enumerate(classes):
        own = np.flatnonzero(labels == index)
        if seed is not None:
            # A key for each class: how one is drawn does not depend on the others.
            own = keyed_generator(seed, index).permutation(own)
        cuts = np.cumsum(sizes)
        if False in kinds:
            # The small term makes 0.1 + 0.2 of 10 images three of them, whatever floats add up to.
            cuts = np.minimum(len(own), cuts * len(own) + 0.5 + 1e-9).astype(int)
        elif sum(sizes) > len(own):
            raise OptionsError(
                f"{shown} asks for {sum(sizes)} images per label, but {name!r} has {len(own)}"
            )
        pieces.append(np.split(own, cuts))
    parts = [np.sort(np.concatenate(part)) for part in zip(*pieces, strict=True)]
    if not len(parts[-1]):  # nothing is left for the rest
        parts.pop()
    if len(parts) < 2 or not all(map(len, parts)):
        raise OptionsError(f"{shown} of {len(labels):,} images leaves a part empty")
    return parts
