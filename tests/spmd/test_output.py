"""Folding what ranks said loses nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpupool.spmd.output import fold, fold_displays

RANKS = st.integers(0, 40)
# few different texts, so that ranks often agree
TEXTS = st.dictionaries(
    RANKS, st.sampled_from(["", "a", "b", "a\nb"]) | st.text("ab\n", max_size=3)
)


@given(TEXTS)
def test_unfolding_the_groups_gives_each_rank_its_text(texts: dict[int, str]) -> None:
    groups = fold(texts)
    assert {rank: group.text for group in groups for rank in group.ranks} == texts
    assert sum(len(group.ranks) for group in groups) == len(texts)


def test_equal_figures_are_shown_once_and_a_repeated_one_twice() -> None:
    red, blue = {"data": {"text/html": "red"}}, {"data": {"text/html": "blue"}}
    folded = fold_displays({1: [red, blue], 0: [red, red]})
    assert folded == [((0, 1), red), ((0,), red), ((1,), blue)]
