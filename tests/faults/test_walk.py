"""Random things are done to a pool, and what is promised holds after each.

What is done, and when, follows from the seed and the number of the action alone. What the machine
makes of that is what is tried out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.faults.invariants import Faulty
from tests.support.processes import kill

RANKS = range(3)
WAITS = (  # what ranks do when they are stopped or killed; each would never end
    "while True: pass",
    "dist.all_reduce(torch.ones(1))\nif rank == 0:\n    import time; time.sleep(600)\n"
    "dist.all_reduce(torch.ones(1))",
    "dist.barrier() if rank else dist.all_reduce(torch.ones(3))\nimport time; time.sleep(600)",
    "import time\nwhile True:\n    try: time.sleep(0.05)\n    except Exception: pass",
    "import subprocess; subprocess.run(['sleep', '600'])",
    "import threading; threading.Event().wait()",
    "while True: print('x' * 100)",
)
Chance = random.Random


def some(chance: Chance) -> list[int]:
    return chance.sample(RANKS, chance.choice((1, 1, 1, 2, len(RANKS))))


def moment(chance: Chance) -> float:
    return chance.choice((0.0, 0.1, 0.4, 0.8))


# ---- what is done: the ranks that it costs -----------------------------------------------------


def assign(faulty: Faulty, chance: Chance) -> list[int]:
    value = chance.randrange(10**6)
    assert faulty.pool.run(f"other = {value} + rank; other")[2] == value + 2
    return []


def raise_on_one(faulty: Faulty, chance: Chance) -> list[int]:
    """The others have changed something, and wait."""
    failing = chance.choice(RANKS)
    error = faulty.fails(
        f"dist.barrier()\nif rank == {failing}: raise ValueError('planted')\n"
        "other = rank\ndist.barrier()"
    )
    assert str(error).startswith(f"rank {failing}: ValueError: planted")
    found = faulty.pool.run("globals().get('other')")
    assert all(found[rank] == rank for rank in set(RANKS) - {failing})
    return []


def stop(faulty: Faulty, chance: Chance) -> list[int]:
    """Once, twice or five times, at any moment."""
    execution = faulty.begun(chance.choice(WAITS), moment(chance))
    for _ in range(chance.choice((1, 1, 2, 5))):
        execution.interrupt()
        execution.wait(0.2)
    assert "KeyboardInterrupt" in str(faulty.ended(execution))
    return []


def kill_idle(faulty: Faulty, chance: Chance) -> list[int]:
    ranks = some(chance)
    kill(faulty.pool, *ranks)
    return ranks


def kill_in_a_cell(faulty: Faulty, chance: Chance) -> list[int]:
    execution = faulty.begun(chance.choice(WAITS), moment(chance))
    ranks = kill_idle(faulty, chance)
    assert "killed by SIGKILL" in str(faulty.ended(execution))
    return ranks


def restart(faulty: Faulty, chance: Chance) -> list[int]:
    ranks = some(chance)
    faulty.pool.restart(ranks)
    return ranks


ACTIONS: dict[Callable[[Faulty, Chance], list[int]], int] = {  # and how often
    assign: 5,
    raise_on_one: 4,
    stop: 6,
    kill_idle: 4,
    kill_in_a_cell: 4,
    restart: 3,
}


@pytest.mark.long
@pytest.mark.timeout(0)  # each cell has its limit
@pytest.mark.parametrize("seed", range(1, 6))
def test_nothing_that_happens_in_any_order_costs_more_than_it_must(
    faulty: Faulty, seed: int
) -> None:
    for number in range(50):
        chance = Chance(f"{seed} {number}")
        (action,) = chance.choices([*ACTIONS], [*ACTIONS.values()])
        print(number, action.__name__, flush=True)
        faulty.pool.run("kept = 10 + rank")
        now = replace(faulty)  # with the ranks of now
        now.check(lost=action(now, chance))
