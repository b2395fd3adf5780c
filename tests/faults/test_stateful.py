"""Anything in any order: random cells, errors, deaths, stops and restarts, and a model beside them.

    python -m pytest tests/faults/test_stateful.py --chaos-s 3600 [--chaos-seed N]

The order follows from a seed, which is printed when it fails, with what was done. The moments at
which signals strike do not: they are what is tried out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest

import gpupool
from gpupool import Pool, SpmdError
from gpupool.pool import session
from tests.faults.invariants import DEADLINE_S, KEPT, SUM, only_the_family
from tests.pool.processes import folder_of, gone, kill, members

SEED, LIMIT_S = 5, 60.0
WAITS = (
    "dist.all_reduce(torch.ones(1))",
    "dist.barrier()",
    "dist.all_gather_object([None] * world_size, rank)",
    "import time; time.sleep(600)",
    "while True: pass",
    "while True:\n        try: dist.all_reduce(torch.ones(1))\n        except Exception: pass",
)


class Chaos:
    """A pool, what is done to it, and what each rank's variable must be after that."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.done: list[str] = []
        self.pool: Pool | None = None
        self.kept: dict[int, int | None] = {}
        self.generation = 0

    # ---- what is done: each returns in words what it was ---------------------------------

    def start(self) -> str:
        n = self.random.choice((2, 3))
        self.pool, self.generation = gpupool.start(n=n, device="cpu"), 0
        self.kept = dict.fromkeys(range(n))
        return f"start of {n}"

    def run(self, pool: Pool) -> str:
        value = self.random.randrange(1000)
        pool.run(f"kept = {value} + rank; dist.barrier()", timeout_s=DEADLINE_S)
        self.kept = {rank: value + rank for rank in self.kept}
        return f"kept = {value} + rank"

    def raise_error(self, pool: Pool) -> str:
        rank, wait, after_s = self.rank(), self.random.choice(WAITS), self.moment()
        code = (
            f"if rank == {rank}:\n    import time; time.sleep({after_s}); 1 / 0\nelse:\n    {wait}"
        )
        self.fails(pool, code)
        return f"error on {rank} after {after_s}, others: {wait}"

    def interrupt(self, pool: Pool) -> str:
        wait, after_s, times = self.random.choice(WAITS), self.moment(), self.random.choice((1, 2))

        code = f"if rank == {self.rank()}:\n    import time; time.sleep(600)\nelse:\n    {wait}"
        execution = pool.begin(code, ranks=list(self.kept), on_output=lambda *_: None)
        time.sleep(after_s)
        for _ in range(times):
            execution.interrupt()
        assert execution.wait(DEADLINE_S)
        return f"Stop x {times} after {after_s}: {wait}"

    def interrupt_nothing(self, pool: Pool) -> str:
        pool.interrupt()
        return "Stop while idle"

    def limit(self, pool: Pool) -> str:
        wait = self.random.choice(WAITS)
        self.fails(pool, f"if rank > 0:\n    {wait}", timeout_s=0.2)
        return f"time limit: {wait}"

    def kill_idle(self, pool: Pool) -> str:
        ranks = self.some_ranks()
        self.kill(pool, ranks)
        return f"kill {ranks}, idle"

    def kill_busy(self, pool: Pool) -> str:
        ranks, wait, after_s = self.some_ranks(), self.random.choice(WAITS), self.moment()
        code = f"if rank not in {ranks}:\n    {wait}\nelse:\n    import time; time.sleep(600)"
        execution = pool.begin(code, ranks=list(self.kept), on_output=lambda *_: None)
        time.sleep(after_s)
        self.kill(pool, ranks)
        assert execution.wait(DEADLINE_S)
        return f"kill {ranks} after {after_s}, others: {wait}"

    def crash(self, pool: Pool) -> str:
        rank, how = self.rank(), self.random.choice(("os._exit(1)", "os.abort()"))
        self.fails(pool, f"import os\nif rank == {rank}: {how}\ndist.barrier()")
        self.kept[rank] = None
        return f"{how} on {rank}"

    def restart(self, pool: Pool) -> str:
        ranks = self.some_ranks()
        pool.restart(ranks)
        self.kept |= dict.fromkeys(ranks)
        return f"restart {ranks}"

    def stop(self, pool: Pool) -> str:
        pids, folder = members(pool), folder_of(pool)
        pool.stop()
        assert gone(*pids)
        assert not folder.exists()
        self.pool = None
        return "stop"

    # ---- and what has to hold afterwards --------------------------------------------------

    def step(self) -> None:
        """Do one thing, and see whether all is as the model says."""
        if self.pool is None:
            self.done.append(self.start())
        else:
            actions: list[Callable[[Pool], str]] = [self.raise_error, self.interrupt, self.run]
            actions += [self.limit, self.kill_idle, self.kill_busy, self.crash, self.restart]
            actions += [self.interrupt_nothing, self.stop]
            weights = (4, 4, 4, 2, 2, 4, 1, 1, 2, 0.5)
            (action,) = self.random.choices(actions, weights)
            self.done.append(f"{action.__name__}...")
            self.done[-1] = action(self.pool)
        if self.pool is not None and self.random.random() < 0.7:  # or one right after the other
            self.check(self.pool)

    def check(self, pool: Pool) -> None:
        """The group works, variables are what they must be, nobody is left over."""
        began = time.monotonic()
        total = float(len(self.kept))
        assert dict(pool.run(SUM, timeout_s=DEADLINE_S)) == dict.fromkeys(self.kept, total)
        assert dict(pool.run(KEPT, timeout_s=DEADLINE_S)) == self.kept
        assert pool.generation >= self.generation
        self.generation = pool.generation
        only_the_family(pool)
        assert time.monotonic() - began < LIMIT_S

    def fails(self, pool: Pool, code: str, timeout_s: float = DEADLINE_S) -> None:
        with pytest.raises(SpmdError):
            pool.run(code, timeout_s=timeout_s)

    def kill(self, pool: Pool, ranks: list[int]) -> None:
        pool.wait_until_usable()
        kill(pool, *ranks)
        self.kept |= dict.fromkeys(ranks)

    def rank(self) -> int:
        return self.random.randrange(len(self.kept))

    def some_ranks(self) -> list[int]:
        return sorted(self.random.sample(list(self.kept), self.random.choice((1, 1, 2))))

    def moment(self) -> float:
        return self.random.choice((0.0, 0.01, 0.05, 0.2, 0.4))


@pytest.fixture
def chaos(request: pytest.FixtureRequest) -> Iterator[Chaos]:
    """A seed for each hour: the same one in every short run."""
    asked = request.config.getoption("--chaos-seed")
    is_short = request.config.getoption("--chaos-s") <= 60.0
    seed = asked if asked is not None else SEED if is_short else random.randrange(10**6)
    session.stop()
    chaos = Chaos(seed)
    print(f"--chaos-seed {seed}")
    yield chaos
    session.stop()
    for number, text in enumerate(chaos.done):
        print(f"{number:4} {text}")


@pytest.mark.timeout(0)  # each step has a deadline
def test_nothing_that_happens_in_any_order_costs_more_than_it_must(
    chaos: Chaos, request: pytest.FixtureRequest
) -> None:
    end = time.monotonic() + request.config.getoption("--chaos-s")
    while time.monotonic() < end:
        chaos.step()
    if chaos.pool is not None:
        chaos.check(chaos.pool)
