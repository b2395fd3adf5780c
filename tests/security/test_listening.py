"""What another user hears and reads of a pool."""

from __future__ import annotations

import os

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
SHARED = ("/dev/shm", "/dev/mqueue", "/run/lock")


@pytest.fixture
def sniffer(pool: Actor, alice: User, bob: User) -> Actor:
    """Bob, subscribed to every port of Alice, as far as she lets him."""
    sniffer = bob.act("attackers", "sniffer", alice.uid)
    ports = {port for _, port in pool.do("listeners")}
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
    assert report["heard"].keys() == {str(open_port)}, report["kept"]
    assert report["admitted"] == [open_port]  # so nothing that he sends arrives, either


def test_nothing_that_the_machine_shares_is_for_others(pool: Actor, alice: User) -> None:
    """Shared memory, message queues and lock files; its folder: `tests/pool/environment/`."""
    pool.do("run", source="kept = torch.ones(1 << 20)")
    shared = [path for folder in SHARED for path in owned(folder, alice)]
    assert [path for path in shared if os.stat(path).st_mode & 0o077] == []


def owned(folder: str, user: User) -> list[str]:
    """The files of a user in a folder."""
    if not os.path.isdir(folder):
        return []
    with os.scandir(folder) as found:
        return [one.path for one in found if one.stat(follow_symlinks=False).st_uid == user.uid]
