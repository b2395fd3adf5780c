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
def alice(users: tuple[User, User]) -> Iterator[User]:
    """The user who has a pool; it ends with the test."""
    yield users[0]
    assert users[0].close() == []


@pytest.fixture
def bob(users: tuple[User, User]) -> Iterator[User]:
    """The user who attacks; what he does ends with the test."""
    yield users[1]
    assert users[1].close() == []


@pytest.fixture
def victim(alice: User) -> Actor:
    """A process of Alice's without a pool, which runs cells."""
    return alice.act("hosts.notebook")


@pytest.fixture
def pool(victim: Actor) -> Actor:
    """A process of Alice's with a pool of two."""
    victim.do("run", source="start(n=2)")
    return victim
