"""`init_process_group` and `destroy_process_group` in cells, where the pool has a group already."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpupool import Pool, PoolError, SpmdError
from gpupool.core.wire.requests import SetEnvironment
from tests.support.raising import frames_of_ours, raises
from tests.support.waits import peers

SUM = "t = torch.ones(1); dist.all_reduce(t); t.item()"
TIMEOUT = "str(dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout)"
NETWORK = "GLOO_SOCKET_IFNAME"


@pytest.fixture
def pool(pool2: Pool) -> Iterator[Pool]:
    """The shared pool, whose group is the pool's own again afterwards."""
    yield pool2
    pool2.run("if dist.is_initialized(): dist.destroy_process_group()")
    assert dict(pool2.run(f"{SUM}, {TIMEOUT}")) == both((2.0, "0:30:00"))


def both(value: object) -> dict[int, object]:
    return {0: value, 1: value}


ASKS = """
import datetime, os
before = dist.group.WORLD
dist.init_process_group(backend=dist.Backend.GLOO, init_method='env://')
os.environ['MASTER_PORT'] = '12355'
dist.init_process_group('gloo', 'tcp://localhost:12355', rank=rank, world_size=2)
dist.init_process_group()
dist.init_process_group("cpu:gloo", timeout=datetime.timedelta(minutes=5))
"""


def test_a_group_that_is_as_asked_is_kept_and_given_the_timeout(pool: Pool) -> None:
    generation = pool.generation
    found = pool.run(f"{ASKS}(dist.group.WORLD is before, {TIMEOUT})")
    assert dict(found) == both((True, "0:05:00"))
    assert dict(pool.run(SUM)) == both(2.0)
    assert pool.generation == generation


@pytest.mark.parametrize(
    ("ask", "shown"),
    [
        ("init_process_group('nccl')", "NCCL"),
        ("new_group([0, 1], backend='nccl')", "NCCL"),
        ("init_process_group('gloo', world_size=4)", ("init_process_group: world_size 4 ", " 2. ")),
        (
            "init_process_group('gloo', rank=1 - rank, world_size=2)",
            ("init_process_group: rank ", " 0", " 1"),
        ),
    ],
)
def test_what_there_cannot_be_is_refused(pool: Pool, ask: str, shown: Any) -> None:
    with raises(SpmdError, shown) as caught:
        pool.run(f"dist.{ask}")
    assert not frames_of_ours(caught.value.first.traceback)


def test_a_rank_that_waits_for_one_that_failed_is_freed(pool: Pool, tmp_path: Path) -> None:
    pool.run(peers(tmp_path / "waits", waits=1))
    cell = (
        "dist.destroy_process_group()\nif rank == 0: until_told(); 1 / 0\ndist.init_process_group()"
    )
    with pytest.raises(SpmdError) as caught:
        pool.run(cell, timeout_s=30)
    assert str(caught.value).startswith("rank 0: ZeroDivisionError")
    place = "init_process_group (pool.run, line 3)"
    assert caught.value.others() == {f"waiting in {place}": [1]}


def test_the_first_error_and_what_nccl_has_logged_of_it_are_shown(pool: Pool) -> None:
    warning = "host:1:2 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-x"
    log = f"import os\nos.write(1, b'{warning}\\n'); os.environ['{NETWORK}'] = 'nosuch'"
    pool.run(f"{log}\ndist.destroy_process_group()")
    try:
        with raises(PoolError, "nosuch", f" NCCL wrote: {warning}."):
            pool.run(SUM)
    finally:
        for answer in pool.engines.control(
            SetEnvironment({NETWORK: "lo"}, [], False), [0, 1]
        ).values():
            answer.result(30)


def test_what_torchrun_sets_is_set(pool: Pool) -> None:
    names = (
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE "
        "MASTER_ADDR TORCHELASTIC_RESTART_COUNT"
    )
    found = pool.run(f"import os, sys; [os.environ[name] for name in {names.split()}]")
    assert found[1] == ["1", "1", "2", "2", "0", "1", "127.0.0.1", "0"]
    ports = pool.run("int(os.environ['MASTER_PORT'])")
    assert ports[0] == ports[1] > 1023
    found = pool.run("sys.argv, __name__, dist.is_torchelastic_launched()")
    assert dict(found) == both((["notebook"], "__main__", True))
