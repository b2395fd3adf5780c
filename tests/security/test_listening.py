"""What another user hears, and what the pool hears of him."""

from __future__ import annotations

import os
from itertools import product

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
    heard = {port: number for port, number in report["heard"].items() if port != str(open_port)}
    assert heard == {}, report["kept"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["unsigned", "damaged", "replayed", "oversized", "flood"])
def test_what_another_user_sends_has_no_effect(pool: Actor, sniffer: Actor, kind: str) -> None:
    pool.do("run", source="kept = 10 + rank")
    assert pool.do("run", source=SAYS) == SAID  # something to be heard, and sent again
    pids, logs = pool.do("status")["pids"], pool.do("logs")
    sent = sniffer.do("send", kind=kind)
    answer = pool.ask("run", source=SAYS, timeout_s=15)
    assert answer.get("value") == SAID, (sent, answer)
    assert pool.do("run", source="kept")["values"] == {"0": 10, "1": 11}
    assert pool.do("status")["pids"] == pids
    grown = {name: size - logs[name] for name, size in pool.do("logs").items()}
    assert grown == dict.fromkeys(logs, 0), sent


def test_everything_listens_at_loopback_alone(pool: Actor) -> None:
    found = pool.do("listeners")
    assert len(found) >= 16
    assert {address for address, _ in found} == {"127.0.0.1"}


def test_another_user_reads_nothing_of_its_processes(pool: Actor, alice: User, bob: User) -> None:
    entries = ("environ", "mem", "fd", "maps", "cwd", "root", "io", "stack", "syscall", "auxv")
    entries += ("smaps", "pagemap", "personality", "fdinfo", "map_files", "ns", "task")
    pids = {alice.actors[0].pid, *pool.do("status")["pids"].values()}
    assert len(pids) >= 6
    paths = [f"/proc/{pid}/{entry}" for pid, entry in product(pids, entries)]
    peeper = bob.act("attackers", "peeper", alice.uid)
    allowed = {f"/proc/{pid}/task" for pid in pids}  # what `ps` shows
    assert set(peeper.do("read", paths=paths)) <= allowed
    own = [f"/proc/{peeper.pid}/{entry}" for entry in ("environ", "fd", "maps")]
    assert peeper.do("read", paths=own) == own


def test_another_user_reads_and_lists_nothing_of_its_folder(
    pool: Actor, alice: User, bob: User
) -> None:
    modes = pool.do("files")
    assert any(path.endswith("ipcontroller-client.json") for path in modes)
    peeper = bob.act("attackers", "peeper", alice.uid)
    assert peeper.do("read", paths=[*modes, str(alice.home)]) == []
    assert peeper.do("read", paths=[str(alice.folder)]) == [str(alice.folder)]


def test_what_the_machine_shares_has_nothing_of_it(pool: Actor, alice: User, bob: User) -> None:
    """Shared memory, message queues and lock files."""
    pool.do("run", source="kept = torch.ones(1 << 20)")
    shared = [path for folder in SHARED for path in owned(folder, alice)]
    peeper = bob.act("attackers", "peeper", alice.uid)
    assert peeper.do("read", paths=shared) == []


def owned(folder: str, user: User) -> list[str]:
    """The files of a user in a folder."""
    if not os.path.isdir(folder):
        return []
    with os.scandir(folder) as found:
        return [one.path for one in found if one.stat(follow_symlinks=False).st_uid == user.uid]
