"""Another user takes the places of ranks in process groups while they are formed.

He runs all the while, and never runs code as the pool's owner; where he keeps a group from being
formed, the error says who did. When he has ended, all goes on with the variables that were there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.security.lines import Actor
from tests.security.users import User
from tests.support.processes import until

pytestmark = pytest.mark.long

SUM = "x = torch.ones(1); dist.all_reduce(x); x.item()"
GATHER = """
found = [None, None]
dist.all_gather_object(found, {{"rank": rank, "note": "a private result"}}, group={0})
if {0} not in (None, dist.group.WORLD): dist.destroy_process_group({0})
found
"""
WAYS = {  # in which a cell makes a group
    "new_group": "group = dist.new_group([0, 1])",
    "mesh": "from torch.distributed.device_mesh import init_device_mesh\n"
    "group = init_device_mesh('cpu', (2,)).get_group()",
    "init": "dist.destroy_process_group()\n"
    "dist.init_process_group('gloo')\n"
    "group = dist.group.WORLD",
    "detail": "dist.set_debug_level(dist.DebugLevel.DETAIL)\n"
    "try: group = dist.new_group([0, 1])\n"
    "finally: dist.set_debug_level(dist.DebugLevel.OFF)",
}
IN_COLLECTIVE = "if rank == 1: raise ValueError('typo')\ndist.all_reduce(torch.ones(1))"
GLOO_ENDS = "killed by SIGABRT"
FORMING_S = 60.0  # longer than all attempts to form a group may take
MANY = pytest.mark.parametrize(
    "times", [2, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)


class Attack:
    """Bob's hijackers while they run."""

    def __init__(self, alice: User, bob: User) -> None:
        self._alice, self._bob = alice, bob
        self.proof = bob.folder / f"proof{bob.num_actors}"  # made by his code, were it run
        self.actors: list[Actor] = []

    def begin(self, *ways: tuple[int, str]) -> None:
        """Have a hijacker for each (last number, how): see `attackers.Hijacker`."""
        for last, how in ways or ((15, "obey"),):
            actor = self._bob.act("attackers", "hijacker", self._alice.uid, self.proof, last, how)
            until(lambda actor=actor: actor.do("report")["looked"] > 0, 5.0, "his watching")
            self.actors.append(actor)

    def end(self) -> int:
        """End them; how many connections they have begun. Some he never gets: he comes too late."""
        knocked = sum(actor.do("report")["knocked"] for actor in self.actors)
        for actor in self.actors:
            actor.close()
        self.actors.clear()
        return knocked

    def check(self, answer: dict[str, Any], *instead: str) -> None:
        """Fails if his code has run, if he has read anything, or if an error does not name him.

        Args:
            instead: words of errors that need not name him.
        """
        read = [line for actor in self.actors for line in actor.do("report")["read"]]
        ran = self.proof.read_text() if self.proof.exists() else ""
        assert ran == "", f"code of his has run as {ran}; it came to {answer}; he has read {read}"
        assert not any("private" in line for line in read), read
        if "error" in answer:
            expected = (self._bob.name, "ValueError: typo", *instead)
            assert any(words in answer["text"] for words in expected), answer


@pytest.fixture
def attack(alice: User, bob: User) -> Iterator[Attack]:
    """Of Bob on Alice; it has not begun."""
    attack = Attack(alice, bob)
    yield attack
    attack.end()


def has_kept(victim: Actor, values: dict[str, int | None]) -> None:
    """The pool works, and its ranks have these values."""
    assert victim.do("run", source=SUM, timeout_s=30)["values"] == {"0": 2.0, "1": 2.0}
    assert victim.do("run", source="globals().get('kept')")["values"] == values


def ranks_of(victim: Actor) -> dict[str, int]:
    """The process of each rank."""
    pids = victim.do("status")["pids"]
    return {str(rank): pids[f"rank {rank}"] for rank in range(2)}


@MANY
def test_while_pools_start(victim: Actor, attack: Attack, times: int) -> None:
    attack.begin()
    for _ in range(times):
        attack.check(victim.ask("start"))
        attack.check(victim.ask("stop"))
    assert attack.end() > 0
    victim.do("start")
    has_kept(victim, {"0": None, "1": None})


@pytest.mark.parametrize("way", WAYS)
@MANY
def test_while_cells_make_groups(pool: Actor, attack: Attack, way: str, times: int) -> None:
    pool.do("run", source="kept = 10 + rank")
    cell = f"{WAYS[way]}\n{GATHER.format('group')}"
    attack.begin()
    for _ in range(times):
        attack.check(pool.ask("run", source=cell, timeout_s=FORMING_S))
    assert attack.end() > 0
    expected = [{"rank": rank, "note": "a private result"} for rank in range(2)]
    answer = pool.ask("run", source=cell, timeout_s=30)
    assert answer.get("value", answer)["values"] == {"0": expected, "1": expected}
    has_kept(pool, {"0": 10, "1": 11})


@MANY
def test_while_the_group_is_formed_again_after_an_error(
    pool: Actor, attack: Attack, times: int
) -> None:
    pool.do("run", source="kept = 10 + rank")
    attack.begin()
    for _ in range(times):
        attack.check(pool.ask("run", source=IN_COLLECTIVE, timeout_s=FORMING_S))
        attack.check(pool.ask("run", source=GATHER.format("None"), timeout_s=FORMING_S))
    assert attack.end() > 0
    has_kept(pool, {"0": 10, "1": 11})


@MANY
def test_while_a_rank_is_replaced(pool: Actor, attack: Attack, times: int) -> None:
    pool.do("run", source="kept = 10 + rank")
    attack.begin()
    for _ in range(times):
        attack.check(pool.ask("kill", rank=1))
        attack.check(pool.ask("run", source=GATHER.format("None"), timeout_s=FORMING_S))
    assert attack.end() > 0
    has_kept(pool, {"0": 10, "1": None})


@pytest.mark.parametrize(
    "ways",
    [[(300, "obey")], [(15, "lie")], [(15, "spin")], [(15, "obey"), (63, "lie")]],
    ids=lambda ways: "+".join(f"{how}{last}" for last, how in ways),
)
def test_in_every_way(pool: Actor, attack: Attack, ways: list[tuple[int, str]]) -> None:
    attacked(pool, attack, ways)
    has_kept(pool, {"0": 10, "1": 11})


def test_gloo_may_end_ranks_and_then_they_are_replaced(pool: Actor, attack: Attack) -> None:
    """What it does not expect, said before anybody can prove who speaks, ends the process.

    That is a denial of service, which costs the variables of the rank. The rank does not know who
    it was, so the error has gloo's words, if the rank could still read its pipe before it was
    gone. Ranks that live keep theirs.
    """
    before = attacked(pool, attack, [(15, "crash")], GLOO_ENDS)
    lives = {rank: pid == before[rank] for rank, pid in ranks_of(pool).items()}
    has_kept(pool, {rank: 10 + int(rank) if lives[rank] else None for rank in before})


def attacked(
    pool: Actor, attack: Attack, ways: list[tuple[int, str]], *instead: str
) -> dict[str, int]:
    """Groups are made and formed again meanwhile; the processes of the ranks before."""
    pool.do("run", source="kept = 10 + rank")
    before = ranks_of(pool)
    attack.begin(*ways)
    cell = f"{WAYS['new_group']}\n{GATHER.format('group')}"
    for source in (cell, IN_COLLECTIVE, GATHER.format("None")):
        attack.check(pool.ask("run", source=source, timeout_s=FORMING_S), *instead)
    assert attack.end() > 0

    def is_mended() -> bool:
        answer = pool.ask("run", source=SUM, timeout_s=30)
        if instead and "%gpupool restart" in answer.get("text", ""):
            pool.do("restart")
        return "value" in answer

    until(is_mended, 10.0, "a whole group")
    return before


def test_a_crowd_at_the_door(victim: Actor, alice: User, bob: User) -> None:
    """More connections than a process may have files do not end a rank, nor hurt the group."""
    victim.do("start", max_files=300)
    victim.do("run", source="kept = 10 + rank")
    before = ranks_of(victim)
    crowd = bob.act("attackers", "crowd", alice.uid, 350)
    assert crowd.do("connect") > 350
    has_kept(victim, {"0": 10, "1": 11})
    assert ranks_of(victim) == before
    with_error = victim.ask("run", source=IN_COLLECTIVE, timeout_s=FORMING_S)
    assert "typo" in with_error["text"], with_error
    has_kept(victim, {"0": 10, "1": 11})
    assert ranks_of(victim) == before
