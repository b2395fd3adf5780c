"""Another user takes the places of ranks in process groups while they are formed.

He runs all the while, and never runs code as the pool's owner, nor reads anything; where he keeps a
group from being formed, the error says so. When he has ended, all goes on with the variables that
were there.
"""

from __future__ import annotations

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
TIMES = 50  # each is tried


class Attack:
    """Bob's hijacker, who watches as soon as it is there."""

    def __init__(self, alice: User, bob: User) -> None:
        self.proof = bob.folder / f"proof{bob.num_actors}"  # made by his code, were it run
        self.actor = bob.act("attackers", "hijacker", alice.uid, self.proof)
        until(lambda: self.actor.do("report")["looked"] > 0, 5.0, "his watching")

    def end(self) -> int:
        """End it; how many connections he has begun. Some he never gets: he comes too late."""
        knocked = int(self.actor.do("report")["knocked"])
        self.actor.close()
        return knocked

    def check(self, answer: dict[str, Any]) -> None:
        """Fails if his code has run, or if he has read anything."""
        read = self.actor.do("report")["read"]
        ran = self.proof.read_text() if self.proof.exists() else ""
        assert ran == "", f"code of his has run as {ran}; it came to {answer}; he has read {read}"
        assert not any("private" in line for line in read), read


def has_kept(victim: Actor, values: dict[str, int | None]) -> None:
    """The pool works, and its ranks have these values."""
    assert victim.do("run", source=SUM, timeout_s=30)["values"] == {"0": 2.0, "1": 2.0}
    assert victim.do("run", source="globals().get('kept')")["values"] == values


def test_while_pools_start(victim: Actor, alice: User, bob: User) -> None:
    attack = Attack(alice, bob)
    for _ in range(TIMES):
        attack.check(victim.ask("start"))
        attack.check(victim.ask("stop"))
    assert attack.end() > 0
    victim.do("start")
    has_kept(victim, {"0": None, "1": None})


@pytest.mark.parametrize("way", WAYS)
def test_while_cells_make_groups(pool: Actor, alice: User, bob: User, way: str) -> None:
    pool.do("run", source="kept = 10 + rank")
    cell = f"{WAYS[way]}\n{GATHER.format('group')}"
    attack = Attack(alice, bob)
    for _ in range(TIMES):
        attack.check(pool.ask("run", source=cell, timeout_s=LIMIT_S))
    assert attack.end() > 0
    expected = [{"rank": rank, "note": "a private result"} for rank in range(2)]
    answer = pool.ask("run", source=cell, timeout_s=30)
    if "values" not in answer.get("value", {}):  # what he has left lying makes the first one fail
        answer = pool.ask("run", source=cell, timeout_s=30)
    assert answer["value"]["values"] == {"0": expected, "1": expected}
    has_kept(pool, {"0": 10, "1": 11})


def test_while_the_group_is_formed_again(pool: Actor, alice: User, bob: User) -> None:
    """After an error, and after the death of a rank."""
    pool.do("run", source="kept = 10 + rank")
    attack = Attack(alice, bob)
    for _ in range(TIMES):
        attack.check(pool.ask("run", source=IN_COLLECTIVE, timeout_s=LIMIT_S))
        attack.check(pool.ask("run", source=GATHER.format("None"), timeout_s=LIMIT_S))
    attack.check(pool.ask("kill", rank=1))
    attack.check(pool.ask("run", source=GATHER.format("None"), timeout_s=LIMIT_S))
    assert attack.end() > 0
    has_kept(pool, {"0": 10, "1": None})
