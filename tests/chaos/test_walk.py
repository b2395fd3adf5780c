"""Random things are done to a notebook, and the invariants hold after each.

    python -m tests.chaos.test_walk SEED [NUM_ACTIONS]

does a piece again, and prints each action.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.chaos import actions
from tests.chaos.walk import Walk

ACTIONS: dict[Callable[[Walk], None], float] = {
    actions.assign: 4,
    actions.assign_here: 4,
    actions.read: 5,
    actions.change_here: 3,
    actions.raise_on_one: 4,
    actions.stop: 6,
    actions.kill_idle: 4,
    actions.kill_busy: 4,
    actions.restart: 3,
}


@pytest.mark.long
@pytest.mark.timeout(0)  # each cell has its limit
@pytest.mark.parametrize("seed", range(1, 6))
def test_nothing_that_happens_in_any_order_costs_more_than_it_must(seed: int) -> None:
    walk(seed, 50)


def walk(seed: int, num_actions: int, loud: bool = False) -> None:
    """Walk so many actions; raises AssertionError at the first one that breaks something."""
    with Walk(seed) as one:
        for _ in range(num_actions):
            one.step(tuple(ACTIONS), ACTIONS.values())
            if loud:
                print(one.done[-1], flush=True)
        one.end()


if __name__ == "__main__":
    walk(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 50, loud=True)
