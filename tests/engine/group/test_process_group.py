"""`init_process_group` and `destroy_process_group` in cells, where the pool has a group already."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupool import Pool, SpmdError
from tests.support.raising import frames_of_ours, raises
from tests.support.waits import peers

SUM = "t = torch.ones(1); dist.all_reduce(t); t.item()"
TIMEOUT = "str(dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout)"


@pytest.fixture
def pool(pool2: Pool) -> Iterator[Pool]:
    """The shared pool, whose group is the pool's own again afterwards."""
    yield pool2
    pool2.run("if dist.is_initialized(): dist.destroy_process_group()")
    assert dict(pool2.run(f"{SUM}, {TIMEOUT}")) == dict.fromkeys((0, 1), (2.0, "0:30:00"))


def both(value: object) -> dict[int, object]:
    return {0: value, 1: value}


@pytest.mark.parametrize(
    "ask",
    [
        "dist.init_process_group(backend=dist.Backend.GLOO, init_method='env://')",
        "import os; os.environ['MASTER_PORT'] = '12355'\n"
        "dist.init_process_group('gloo', 'tcp://localhost:12355', rank=rank, world_size=2)",
        "from torch.distributed import init_process_group\ninit_process_group()",
    ],
)
def test_a_group_that_is_as_asked_is_kept(pool: Pool, ask: str) -> None:
    generation = pool.generation
    pool.run("before = dist.group.WORLD")
    assert dict(pool.run(f"{ask}\ndist.group.WORLD is before")) == both(True)
    assert dict(pool.run(SUM)) == both(2.0)
    assert pool.generation == generation


def test_a_group_that_was_left_is_there_again_in_the_next_cell(pool: Pool) -> None:
    left = "dist.destroy_process_group(); dist.is_initialized()"
    assert dict(pool.run(left)) == both(False)
    assert dict(pool.run(SUM)) == both(2.0)

    def leave() -> bool:
        import torch.distributed as dist

        dist.destroy_process_group()
        return dist.is_initialized()

    assert dict(pool.run(leave)) == both(False)
    assert dict(pool.run(SUM)) == both(2.0)


@pytest.mark.parametrize(
    ("ask", "shown"),
    [
        ("world_size=4", ("init_process_group: world_size 4 ", " 2. ")),
        ("rank=1 - rank, world_size=2", ("init_process_group: rank ", " 0", " 1")),
    ],
)
def test_a_place_that_is_not_this_ranks_is_refused(
    pool: Pool, ask: str, shown: tuple[str, ...]
) -> None:
    with raises(SpmdError, shown, ename="ValueError") as caught:
        pool.run(f"dist.init_process_group('gloo', {ask})")
    assert not frames_of_ours(caught.value.first.traceback)
    assert dict(pool.run(SUM)) == both(2.0)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_waits_for_one_that_failed_is_freed(
    pool: Pool, failing: int, tmp_path: Path
) -> None:
    pool.run(peers(tmp_path / "waits", waits=1 - failing))
    fail = f"if rank == {failing}: until_told(); 1 / 0"
    cell = f"dist.destroy_process_group()\n{fail}\ndist.init_process_group()"
    with pytest.raises(SpmdError) as caught:
        pool.run(cell, timeout_s=30)
    assert str(caught.value).startswith(f"rank {failing}: ZeroDivisionError")
    place = "init_process_group (pool.run, line 3)"
    assert caught.value.others() == {f"waiting in {place}": [1 - failing]}


def test_a_rank_that_waits_hears_an_interrupt(pool: Pool) -> None:
    cell = "dist.destroy_process_group()\ndist.init_process_group()"
    with raises(SpmdError, " 0.5 s", ename="TimeoutError"):
        pool.run(cell, ranks=0, timeout_s=0.5)


def test_what_torchrun_sets_is_set(pool: Pool) -> None:
    names = (
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME "
        "ROLE_RANK ROLE_WORLD_SIZE MASTER_ADDR TORCHELASTIC_RESTART_COUNT"
    )
    found = pool.run(f"import os; [os.environ[name] for name in {names.split()}]")
    assert found[1] == ["1", "1", "2", "2", "0", "1", "default", "1", "2", "127.0.0.1", "0"]
    ports = pool.run("import os; int(os.environ['MASTER_PORT'])")
    assert ports[0] == ports[1] > 1023
    assert dict(pool.run("dist.is_torchelastic_launched()")) == both(True)


def test_a_script_finds_no_arguments_and_is_main(pool: Pool) -> None:
    assert dict(pool.run("import sys; sys.argv, __name__")) == both((["notebook"], "__main__"))
    parse = "import argparse; parser = argparse.ArgumentParser()\n"
    assert dict(pool.run(f"{parse}vars(parser.parse_args())")) == both({})
    with pytest.raises(SpmdError, match="SystemExit: 2"):
        pool.run(f"{parse}parser.add_argument('--data', required=True)\nparser.parse_args()")


ALONE = """import datetime
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
if rank == 0: dist.barrier()"""


@pytest.mark.long
def test_a_group_in_which_a_collective_has_timed_out_is_formed_again(pool2: Pool) -> None:
    with pytest.raises(SpmdError, match="Timed out waiting"):
        pool2.run(ALONE)
    assert pool2.run("t = torch.ones(1); dist.all_reduce(t); t.item()")[0] == 2.0
