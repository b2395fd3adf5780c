"""Two users, and a pool of one of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.lines import Actor
from tests.security.users import ROOT, User, two_users


@pytest.fixture(scope="session")
def users() -> Iterator[tuple[User, User]]:
    """Alice, who has a pool, and Bob, who attacks her; skips where no test can be another user."""
    if sys.platform != "linux" or os.getuid() != 0:
        pytest.skip("only root on Linux can start processes of two other users")
    with tempfile.TemporaryDirectory(prefix="gpupool-users-", dir="/tmp") as place:
        users = two_users(Path(place))
        command = users[0].command([sys.executable, "-c", "import gpupool"])
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no process of another user starts: {done.stderr.strip()}")
        yield users


@pytest.fixture
def alice(users: tuple[User, User]) -> Iterator[User]:
    yield users[0]
    assert users[0].close() == []


@pytest.fixture
def bob(users: tuple[User, User]) -> Iterator[User]:
    yield users[1]
    assert users[1].close() == []


@pytest.fixture
def victim(alice: User) -> Actor:
    """A process of Alice's without a pool, which runs cells."""
    return alice.act("hosts.notebook")


@pytest.fixture
def pool(victim: Actor) -> Actor:
    victim.do("run", source="start(n=2)")
    return victim
