"""Which samples go where: arithmetic that holds for all sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.core.errors import OptionsError
from gpupool.data.datastores.splits import split
from tests.support.raising import raises

LABELS = st.lists(st.integers(0, 3), min_size=1, max_size=60).map(np.array)
FRACTIONS = st.lists(st.floats(0.05, 0.9), min_size=1, max_size=3).filter(lambda f: sum(f) <= 1)
SEEDS = st.none() | st.integers(0, 2**32)


@given(LABELS, FRACTIONS, SEEDS)
def test_a_split_gives_each_index_once_and_cuts_each_class_alike(
    labels: np.ndarray, sizes: list[float], seed: int | None
) -> None:
    try:
        parts = split(labels, "abcd", sizes, seed)
    except OptionsError:  # of few samples: a part that is less than half a sample of each class
        assert min([*sizes, 1 - sum(sizes)]) * max(np.bincount(labels)) <= 1
        return
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    for own in range(4):
        total = int((labels == own).sum())
        taken = np.cumsum([int((labels[part] == own).sum()) for part in parts])
        for cut, size in zip(taken.tolist(), np.cumsum(sizes).tolist(), strict=False):
            assert abs(cut - size * total) <= 0.5 + 1e-6
    assert all(map(np.array_equal, parts, split(labels, "abcd", sizes, seed)))


@given(LABELS, st.lists(st.integers(1, 5), min_size=1, max_size=3), SEEDS)
def test_a_split_by_counts_is_exact(labels: np.ndarray, sizes: list[int], seed: int | None) -> None:
    counts = np.bincount(labels, minlength=4)
    try:
        parts = split(labels, "abcd", sizes, seed)
    except OptionsError:
        assert counts.min() < sum(sizes) or (counts == sum(sizes)).all()
        return
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    for part, size in zip(parts, sizes, strict=False):
        assert np.bincount(labels[part], minlength=4).tolist() == [size] * 4
    if seed is None:
        assert {np.flatnonzero(labels == own)[0] for own in range(4)} <= set(parts[0].tolist())


@pytest.mark.parametrize(
    "sizes", [(), (0.0,), (1.0,), (1.5,), (0.6, 0.6), (0.5, 2), (0,), (True,), (0.99,), (5, 5)]
)
def test_impossible_sizes_say_what_to_give(sizes: tuple[float, ...]) -> None:
    with raises(OptionsError, "split_each_label("):
        split(np.zeros(9, np.int64), "a", sizes, None)
