"""Labs, where there can be any: else the tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.lab import Lab


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Hosts with homes of their own."""
    lab = Lab()
    yield lab
    lab.down()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Lab]:
    """Hosts with one home, and Slurm."""
    lab = Lab(with_slurm=True)
    yield lab
    lab.down()
