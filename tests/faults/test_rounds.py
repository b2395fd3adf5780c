"""After many rounds of abort and re-form every process holds what it held before."""

from __future__ import annotations

import os

import pytest

from gpupool import SpmdError
from tests.faults.invariants import SUM, Faulty, Footprint
from tests.support.processes import folder_of, until

pytestmark = pytest.mark.long

# In a run of 300 rounds a rank gained up to 36 MiB until round 200 and nothing after that: buffers
# of bounded size, such as torch's flight recorder, fill up.
MAX_MORE_MIB = 40.0
WARM_UP, ROUNDS = 20, 100
RAISES = """
if rank == {rank}: raise ValueError("one")
dist.all_reduce(torch.ones(1))
"""
MISMATCH = """
if rank == 0: dist.all_reduce(torch.ones(1))
elif rank == 1: dist.broadcast(torch.ones(1), 2)
else: dist.barrier()
"""


def footprints(faulty: Faulty) -> dict[str, Footprint]:
    """What the client and the ranks hold, after they have let go of what they can."""
    faulty.pool.run("import gc; gc.collect()")
    pids = {f"rank {rank}": pid for rank, pid in faulty.pids.items()}
    return {name: Footprint.of(pid) for name, pid in {"client": os.getpid(), **pids}.items()}


def go_round(faulty: Faulty, number: int) -> None:
    """Most are ended by the order that ends them all: after an error that comes a moment later."""
    if number % 10 == 0:
        with pytest.raises(SpmdError, match="ValueError: one"):
            faulty.pool.run(RAISES.format(rank=number % 3), timeout_s=30)
    else:
        cell = faulty.begin(MISMATCH)
        cell.wait(0.02)
        faulty.pool.group.abort(dict.fromkeys(range(3)))
        assert cell.wait(10.0)
        assert len(cell.errors) == 3
    assert dict(faulty.pool.run(SUM, timeout_s=30)) == {0: 3.0, 1: 3.0, 2: 3.0}


@pytest.mark.timeout(300)
def test_nothing_piles_up(faulty: Faulty) -> None:
    for number in range(WARM_UP):
        go_round(faulty, number)
    first, generation = footprints(faulty), faulty.pool.generation
    files = sorted(path.name for path in folder_of(faulty.pool).iterdir())
    for number in range(ROUNDS):
        go_round(faulty, number)

    def what_has_grown() -> dict[str, tuple[Footprint, Footprint]]:
        now = footprints(faulty)
        return {name: (before, now[name]) for name, before in first.items() if not flat(name, now)}

    def flat(name: str, now: dict[str, Footprint]) -> bool:
        return (
            now[name].descriptors <= first[name].descriptors
            and now[name].threads <= first[name].threads
            and now[name].rss_mib <= first[name].rss_mib + MAX_MORE_MIB
        )

    until(lambda: not what_has_grown(), 10.0, f"{what_has_grown()}: flat")
    assert faulty.pool.generation == generation + ROUNDS
    more = len(list(folder_of(faulty.pool).iterdir())) - len(files)
    assert more <= 2, sorted({p.name for p in folder_of(faulty.pool).iterdir()} - set(files))
    stores = [path for path in folder_of(faulty.pool).iterdir() if "group" in path.name]
    assert sum(path.stat().st_size for path in stores) < 1 << 20
    faulty.check()
