"""Random things are done to a notebook, and the invariants hold after each: a thousand actions.

    python -m tests.chaos.walk SEED [NUM_ACTIONS]

does a piece again, and prints each action.
"""

from __future__ import annotations

import pytest

from tests.chaos.walk import walk

pytestmark = pytest.mark.long

SHORT, LONG = 20, 50  # actions
SEEDS = range(1, 21)


@pytest.mark.timeout(0)  # each cell has its limit
@pytest.mark.parametrize(
    ("seed", "num_actions"),
    [(132, SHORT), *(pytest.param(seed, LONG, marks=pytest.mark.long) for seed in SEEDS)],
)
def test_nothing_that_happens_in_any_order_costs_more_than_it_must(
    seed: int, num_actions: int
) -> None:
    walk(seed, num_actions)
