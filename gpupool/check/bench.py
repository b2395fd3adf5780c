"""What promises are tried at: a pool of their own. Runs on the client, as a plugin of pytest.

A promise is a test function; its docstring says it in the user's words.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gpupool
from gpupool import Pool
from gpupool.core import current
from gpupool.core.errors import GpuPoolError

HANG_AFTER_S = 3.0
SUM = "x = torch.ones(1, device=device)\ndist.all_reduce(x)\nx.item()"
Tell = Callable[[str], None]  # what was found of a promise that is kept, in words
Unharmed = Callable[..., float]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--where", type=json.loads, default={"device": "cpu", "n": 2})


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """The line of a promise that is kept; pytest itself says why another one is not."""
    if report.when != "call" or not report.passed:
        return None
    told = dict(report.user_properties)
    return "passed", ".", f"ok: {told['promise']} ({report.duration:.1f} s): {told['found']}"


@pytest.fixture(scope="session")
def where(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The options of pools. In the end there is none."""
    yield request.config.getoption("--where")
    if (pool := current.find_pool()) is not None:
        pool.stop()


def start(where: dict[str, Any]) -> Pool:
    try:  # the limit: on a machine whose driver and file system have slept
        return gpupool.start(
            **where, hang_after_s=HANG_AFTER_S, timeout_s=180.0, idle_timeout="10m"
        )
    except GpuPoolError as error:
        pytest.exit(f"FAIL: there is no pool: {type(error).__name__}: {error}", returncode=1)


@pytest.fixture
def pool(where: dict[str, Any]) -> Iterator[Pool]:
    """The pool of the moment: another one, if the last promise has not left it idle."""
    pool = current.find_pool() or start(where)
    yield pool
    if pool.status().state not in ("idle", "stopped"):
        pool.stop()


@pytest.fixture
def on_gpus(pool: Pool) -> bool:
    return all(rank.gpu is not None for rank in pool.ranks)


@pytest.fixture
def last(pool: Pool) -> int:
    """The last rank, which is the one that suffers. Skips where it is alone."""
    if pool.world_size < 2:
        pytest.skip("needs 2 ranks")
    return pool.world_size - 1


@pytest.fixture
def tell(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Tell:
    record_property("promise", request.function.__doc__)
    return lambda text: record_property("found", text)


@pytest.fixture
def unharmed(pool: Pool) -> Unharmed:
    """Fails if the group sums wrongly, or a rank but `replaced` has lost its process or variable;
    gives the seconds until the group works."""
    pool.run("kept = rank")
    before = dict(pool.status().pids)

    def unharmed(replaced: int | None = None) -> float:
        began = time.monotonic()
        # a group that is half aborted may answer too, but not with the right sum
        sums = dict(pool.run(SUM, timeout_s=120.0))
        seconds = time.monotonic() - began
        assert set(sums.values()) == {float(pool.world_size)}, f"afterwards all_reduce gives {sums}"
        after, kept = pool.status().pids, pool.run("globals().get('kept')")
        new = [rank for rank, pid in before.items() if after[rank] != pid]
        assert new == ([] if replaced is None else [replaced]), f"ranks {new} were replaced"
        lost = [rank for rank in before if rank not in new and kept[rank] != rank]
        assert not lost, f"ranks {lost} have lost their variables"
        return seconds

    return unharmed
