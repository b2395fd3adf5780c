"""Two notebooks and one GPU, as far as it goes without one: real starters, real locks."""

from __future__ import annotations

import getpass
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupool.core.errors import PlacementError
from gpupool.pool.launchers.processes import Forked
from tests.support.processes import notebook, until

HOLD = """
import sys, time
from gpupool.pool.launchers.processes import Forked
launch = Forked(lambda *_: None)
print(launch.lock_gpus(sys.argv[1:], len(sys.argv) - 1, False), flush=True)
time.sleep(60)
"""


@pytest.fixture
def gpus() -> list[str]:
    """The names of two GPUs that nobody else has."""
    return [f"GPU-test-{secrets.token_hex(4)}" for _ in range(2)]


@pytest.fixture
def launch() -> Iterator[Forked]:
    launch = Forked(lambda *_: None)
    yield launch
    launch.stop()


def test_a_gpu_in_use_is_refused_with_owner_and_the_way_on_until_its_pool_is_gone(
    launch: Forked, gpus: list[str]
) -> None:
    with notebook(HOLD, gpus[0]) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == f"{gpus[:1]}\n"
        with pytest.raises(PlacementError) as caught:
            launch.lock_gpus(gpus, 2, False)
        assert re.fullmatch(
            rf"You asked for 2 of 2 GPUs, and 1 can be had; other pools use {gpus[0]} by process "
            rf"{other.pid} of {getpass.getuser()}\. `-n 1` takes those; --force .* shares .*",
            str(caught.value),
        )
        assert launch.lock_gpus(gpus, 1, False) == [gpus[1]]
        assert launch.lock_gpus(gpus, 2, True) == gpus
        other.kill()
    until(lambda: taken(launch, gpus[0]), 3.0, "the end of the other notebook's lock")


def taken(launch: Forked, gpu: str) -> bool:
    try:
        return launch.lock_gpus([gpu], 1, False) == [gpu]
    except PlacementError:
        return False


ENDING = """
import sys, time
from gpupool.core.machine.locks import ENDING_STARTER, DeviceLocks, lock_folder
from gpupool.core.machine.processes import set_process_name
set_process_name(ENDING_STARTER)  # as the starter does while the driver takes its time
locks = DeviceLocks(lock_folder())
print(locks.take(sys.argv[1:], 1)[0], flush=True)
time.sleep(1)
"""


def test_a_gpu_of_a_notebook_that_has_ended_is_waited_for(launch: Forked, gpus: list[str]) -> None:
    with notebook(ENDING, gpus[0]) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == f"{gpus[:1]}\n"
        assert launch.lock_gpus(gpus[:1], 1, False) == gpus[:1]
        assert other.wait() == 0


def test_a_stopped_pool_gives_its_gpus_back_while_its_starter_stays_warm(gpus: list[str]) -> None:
    first = Forked(lambda *_: None)
    starter_folder = Path(first.folder).parent
    assert first.lock_gpus(gpus, 2, False) == gpus
    assert first.preloaded.wait(60.0)
    first.stop()
    second = Forked(lambda *_: None)
    assert Path(second.folder).parent == starter_folder
    assert second.lock_gpus(gpus, 2, False) == gpus
    second.stop()
