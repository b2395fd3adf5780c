"""Labs, where there can be any: else the tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.hosts.lab import Lab


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with closing(Lab()) as lab:
        yield lab


@pytest.fixture(scope="module")
def cluster() -> Iterator[Lab]:
    with closing(Lab(with_slurm=True)) as lab:
        yield lab
