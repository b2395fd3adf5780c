"""Another user takes the places of ranks in process groups while they are formed.

He runs all the while, and no rank ever sends him anything; where he keeps a group from being
formed, the error says so. When he has ended, all goes on with the variables that were there.
"""

from __future__ import annotations

from ast import literal_eval
from typing import Any

import pytest

from tests.security.lines import Actor
from tests.security.users import User
from tests.support.processes import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

SUM = "x = torch.ones(1); dist.all_reduce(x); x.item()"
GATHER = """
found = [None, None]
dist.all_gather_object(found, {{"rank": rank, "note": "a private result"}}, group={0})
if {0} not in (None, dist.group.WORLD): dist.destroy_process_group({0})
found
"""
WAYS = {  # in which a cell makes a group
    "new_group": "group = dist.new_group([0, 1])",
    "init": "dist.destroy_process_group()\n"
    "dist.init_process_group('gloo')\n"
    "group = dist.group.WORLD",
}
IN_COLLECTIVE = "if rank == 1: raise ValueError('typo')\ndist.all_reduce(torch.ones(1))"
LIMIT_S = 120.0  # longer than all attempts to form a group may take
TIMES = 10  # each is tried


class Attack:
    """Bob's hijacker, who watches as soon as it is there."""

    def __init__(self, alice: User, bob: User) -> None:
        self.actor = bob.act("security.attackers", "hijacker", alice.uid)
        until(lambda: self.actor.do("report")["looked"] > 0, 5.0, "his watching")

    def end(self) -> int:
        """End it; how many connections he has begun. Some he never gets: he comes too late."""
        knocked = int(self.actor.do("report")["knocked"])
        self.actor.close()
        return knocked

    def check(self, answer: dict[str, Any]) -> None:
        read = self.actor.do("report")["read"]
        assert read == [], f"it came to {answer}"


def spmd(source: str, timeout_s: float = LIMIT_S) -> str:
    return f"dict(pool.run({source!r}, timeout_s={timeout_s}))"


def has_kept(victim: Actor, values: dict[int, int | None]) -> None:
    for source, expected in ((SUM, {0: 2.0, 1: 2.0}), ("globals().get('kept')", values)):
        assert literal_eval(victim.do("run", source=spmd(source, 30))) == expected


def test_while_pools_start(victim: Actor, alice: User, bob: User) -> None:
    attack = Attack(alice, bob)
    for _ in range(TIMES):
        attack.check(victim.ask("run", source="start(n=2)"))
        attack.check(victim.ask("run", source="pool.stop()"))
    assert attack.end() > 0
    victim.do("run", source="start(n=2)")
    has_kept(victim, {0: None, 1: None})


@pytest.mark.parametrize("way", WAYS)
def test_while_cells_make_groups(pool: Actor, alice: User, bob: User, way: str) -> None:
    pool.do("run", source=spmd("kept = 10 + rank"))
    cell = f"{WAYS[way]}\n{GATHER.format('group')}"
    attack = Attack(alice, bob)
    for _ in range(TIMES):
        attack.check(pool.ask("run", source=spmd(cell)))
    assert attack.end() > 0
    expected = [{"rank": rank, "note": "a private result"} for rank in range(2)]
    answer = pool.ask("run", source=spmd(cell, 30))
    if "value" not in answer:  # what he has left lying makes the first one fail
        answer = pool.ask("run", source=spmd(cell, 30))
    assert literal_eval(answer["value"]) == {0: expected, 1: expected}
    has_kept(pool, {0: 10, 1: 11})


def test_while_the_group_is_formed_again(pool: Actor, alice: User, bob: User) -> None:
    """After an error, and after the death of a rank."""
    pool.do("run", source=spmd("kept = 10 + rank"))
    attack = Attack(alice, bob)
    for _ in range(TIMES):
        attack.check(pool.ask("run", source=spmd(IN_COLLECTIVE)))
        attack.check(pool.ask("run", source=spmd(GATHER.format("None"))))
    attack.check(pool.ask("run", source="os.kill(pool.status().pids[1], 9)"))
    attack.check(pool.ask("run", source=spmd(GATHER.format("None"))))
    assert attack.end() > 0
    has_kept(pool, {0: 10, 1: None})
