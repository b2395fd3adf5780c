"""Pools of CPU ranks that all tests of a process share, and the notebook's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from gpupool import Pool, PoolOptions
from gpupool.core.errors import PoolError
from gpupool.core.wire.pickles import namespace
from gpupool.pool import session
from tests.support.environment import environment, plain_environment

EXACT_SIZES = (1, 3)  # what is the same on one rank and on three does not depend on their number


class Pools(Mapping[int, Pool]):
    """`pools[n]` is a pool of `n` ranks, started when a test first asks for it.

    One that an earlier test broke or left busy is replaced; variables of earlier tests may be left
    on the ranks. Who iterates gets one pool of each size that exactness is shown with.
    """

    def __init__(self) -> None:
        self._made: dict[int, Pool] = {}
        self._in_use: set[int] = set()  # by this test, which may keep its ranks busy
        self._environment = plain_environment()  # what a test has set, later ones do not want

    def __getitem__(self, n: int) -> Pool:
        pool = self._made.get(n)
        if pool is None or not (n in self._in_use or _is_usable(pool)):
            if pool is not None:
                pool.stop()
            with environment(self._environment):
                self._made[n] = Pool(PoolOptions(n=n, device="cpu"))
        self._in_use.add(n)
        return self._made[n]

    def __iter__(self) -> Iterator[int]:
        return iter(EXACT_SIZES)

    def __len__(self) -> int:
        return len(EXACT_SIZES)

    def look_again(self) -> None:
        self._in_use.clear()

    def stop(self) -> None:
        for pool in self._made.values():
            pool.stop()


def _is_usable(pool: Pool) -> bool:
    """Whether nothing runs and nothing is missing, once lost ranks are replaced."""
    try:
        pool.wait_until_usable()
    except PoolError:
        return False
    return pool.status().state == "idle"


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.stop()


@pytest.fixture(autouse=True)
def _another_test(request: pytest.FixtureRequest) -> None:
    if "pools" in request.fixturenames:
        request.getfixturevalue("pools").look_again()


@pytest.fixture
def pool2(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """The shared pool of two, which is the pool of this notebook while the test runs."""
    session.stop()
    pool = pools[2]
    monkeypatch.setattr(session, "_current", pool)
    yield pool
    if session.find() is not pool:  # the test has started another one
        session.stop()


@pytest.fixture
def pool3(pools: Pools) -> Pool:
    return pools[3]


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """The notebook's names, as they were before when the test is over."""
    space = namespace()
    before = dict(space)
    yield space
    space.clear()
    space.update(before)
