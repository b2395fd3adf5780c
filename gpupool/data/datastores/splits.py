"""Which samples go where when a data set is split: pure. Runs anywhere; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import OptionsError
from gpupool.data.reading.shards import Indices, keyed_generator


def partition(num_samples: int, num_parts: int, index: int) -> Indices:
    """Every `num_parts`-th index, beginning with `index`."""
    if not 0 <= index < num_parts:
        raise OptionsError(f"index={index} must be in 0..num_parts-1, with num_parts={num_parts}")
    return np.arange(index, num_samples, num_parts)


def split(
    labels: NDArray[np.int64], classes: Sequence[str], sizes: Sequence[float], seed: int | None
) -> list[Indices]:
    """Each class cut alike: indices for each of `sizes`, and for the rest if any is left; sorted.

    `sizes` are fractions of each class, or whole numbers per class. `seed=None` takes the first of
    each class, a number draws them.
    """
    _check_sizes(sizes)
    _require(classes)
    members = [np.flatnonzero(labels == index) for index in range(len(classes))]
    if seed is not None:
        # A key for each class: how one is drawn does not depend on the others.
        members = [keyed_generator(seed, i).permutation(own) for i, own in enumerate(members)]
    parts: list[list[Indices]] = [[] for _ in range(len(sizes) + 1)]
    for label, own in zip(classes, members, strict=True):
        pieces = np.split(own, _cuts(sizes, len(own), label))
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    chosen = [np.sort(np.concatenate(part)) for part in parts]
    # Nothing is left for the rest.
    if len(chosen[-1]) == 0:
        chosen.pop()
    if len(chosen) < 2 or any(len(part) == 0 for part in chosen):
        shown = ", ".join(map(str, sizes))
        raise OptionsError(
            f"split_each_label({shown}) of {len(labels):,} images leaves a part empty"
        )
    return chosen


def _require(classes: Sequence[str]) -> None:
    if not len(classes):
        raise OptionsError("these images have no labels; use subset or partition")


def _check_sizes(sizes: Sequence[float]) -> None:
    counts = [isinstance(size, Integral) and not isinstance(size, bool) for size in sizes]
    if sizes and all(counts) and min(sizes) >= 1:
        return
    # Fractions that add up to 1 may come to slightly more as floats.
    if sizes and not any(counts) and all(0 < size < 1 for size in sizes) and sum(sizes) < 1 + 1e-9:
        return
    shown = ", ".join(map(repr, sizes))
    raise OptionsError(
        f"split_each_label({shown}): give fractions between 0 and 1 that add up to at most 1, "
        "or whole numbers of images per label"
    )


def _cuts(sizes: Sequence[float], num_images: int, label: str) -> list[int]:
    """Where to cut the images of one class."""
    # `_check_sizes` has refused mixtures: all are counts, or all are fractions.
    if all(isinstance(size, Integral) for size in sizes):
        if sum(sizes) > num_images:
            raise OptionsError(
                f"split_each_label asks for {sum(sizes)} images per label, "
                f"but {label!r} has {num_images}"
            )
        return [int(cut) for cut in np.cumsum(sizes)]
    # The small term makes 0.1 + 0.2 of 10 images three of them, whatever floats add up to.
    return [min(num_images, int(cut * num_images + 0.5 + 1e-9)) for cut in np.cumsum(sizes)]
