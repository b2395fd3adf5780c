"""What another user hears and reads of a pool."""

from __future__ import annotations

import pytest

from tests.security.lines import Actor
from tests.security.users import User
from tests.support.processes import until

pytestmark = pytest.mark.long

SAYS = "print('diagnosis of patient', 15 + rank, flush=True); rank"
SAID = {
    "values": {"0": 0, "1": 1},
    "texts": {str(n): f"diagnosis of patient {15 + n}\n" for n in (0, 1)},
}
NUM_CELLS = 5


@pytest.fixture
def sniffer(pool: Actor, alice: User, bob: User) -> Actor:
    """Bob, subscribed to every port of Alice, as far as she lets him."""
    sniffer = bob.act("attackers", "sniffer", alice.uid)
    ports = set(pool.do("listeners"))
    until(lambda: ports <= set(sniffer.do("report")["settled"]), 10.0, "each port's answer")
    return sniffer


def test_another_user_hears_nothing_of_cells_and_trainings(pool: Actor, sniffer: Actor) -> None:
    open_port = pool.do("publish")  # what is for everybody he does hear
    until(lambda: str(open_port) in sniffer.do("report")["heard"], 10.0, "his hearing")
    for _ in range(NUM_CELLS):
        assert pool.do("run", source=SAYS) == SAID
    losses = pool.do("train")["losses"]
    assert losses[-1] == losses[-1]
    before = sniffer.do("report")["heard"][str(open_port)]
    until(lambda: sniffer.do("report")["heard"][str(open_port)] > before, 10.0, "his last word")
    report = sniffer.do("report")
    assert report["heard"].keys() == {str(open_port)}
    assert report["admitted"] == [open_port]  # so nothing that he sends arrives, either
