"""Random things are done to a notebook, and the invariants hold after each.

    python -m tests.chaos.test_walk SEED [NUM_ACTIONS]

does a piece again, and prints each action.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.chaos import faults, variables
from tests.chaos.walk import Walk

ACTIONS: dict[Callable[[Walk], None], float] = {
    variables.assign: 4,
    variables.assign_here: 4,
    variables.read: 5,
    variables.change_here: 3,
    variables.sync: 3,
    faults.raise_on_one: 4,
    faults.stop: 6,
    faults.kill_idle: 4,
    faults.kill_busy: 4,
    faults.crash: 3,
    faults.kill_what_all_need: 1,
    faults.restart: 3,
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
