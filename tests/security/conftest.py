"""Two users, and a pool of one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.lines import Actor
from tests.security.users import NoUsersError, User, two_users


@pytest.fixture(scope="session")
def users() -> Iterator[tuple[User, User]]:
    """Alice, who has a pool, and Bob, who attacks her."""
    try:
        with two_users() as users:
            yield users
    except NoUsersError as error:
        pytest.skip(f"needs two other users: {error}")


@pytest.fixture
def alice(users: tuple[User, User]) -> User:
    """The user who has a pool."""
    return users[0]


@pytest.fixture
def bob(users: tuple[User, User]) -> Iterator[User]:
    """The user who attacks; what he does ends with the test."""
    yield users[1]
    assert users[1].close() == []


@pytest.fixture(scope="session")
def _with_pool(users: tuple[User, User]) -> list[Actor]:
    """The process of Alice that the last test has used."""
    return []


@pytest.fixture
def pool(alice: User, _with_pool: list[Actor]) -> Actor:
    """A process of Alice's with a pool of two, the same from test to test; a new one if need be.

    Variables of earlier tests may be left on the ranks.
    """
    if _with_pool and _with_pool[-1].has_ended():
        _with_pool.clear()
    if not _with_pool:
        _with_pool.append(alice.act("victim"))
    (victim,) = _with_pool
    if victim.ask("status").get("value", {}).get("state") != "idle":
        victim.do("stop")
        victim.do("start")
    return victim


@pytest.fixture
def victim(alice: User) -> Iterator[Actor]:
    """A process of Alice's without a pool, for this test alone."""
    victim = alice.act("victim")
    yield victim
    victim.close()
