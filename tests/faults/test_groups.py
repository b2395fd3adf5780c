"""What holds a process group (FSDP, sub-groups, a DeviceMesh) after it was formed again.

One error says what to do. DDP goes on: `test_table.py`.
"""

from __future__ import annotations

import pytest

from gpupool import Pool, SpmdError
from gpupool.engine.group.forming import EARLIER
from gpupool.pool.calls import freeing

SUM = "x = torch.ones(1); dist.all_reduce(x); x.item()"
HOLDERS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("all",))
sharded = fully_shard(torch.nn.Linear(3, 3), mesh=mesh)
without_1 = dist.new_group([0, 2])

def train():
    sharded(torch.ones(1, 3) * (rank + 1)).sum().backward()

train()
"""
USES = {
    "fsdp": "train(); 8.0",
    "mesh": "y = torch.ones(1); dist.all_reduce(y, group=mesh.get_group('all')); y.item() + 5",
    "sub-group": "if rank != 1: dist.all_reduce(torch.ones(1), group=without_1)",
}


@pytest.fixture
def pool3(pool3: Pool) -> Pool:
    pool3.run(HOLDERS)
    with pytest.raises(SpmdError):  # before any collective, which leaves all as it is
        pool3.run("1 / 0")
    return pool3


def fail(pool: Pool, code: str) -> int:
    generation = pool.generation
    with pytest.raises(SpmdError, match="typo"):
        pool.run(code)
    assert pool.generation == generation + 1
    return pool.generation


@pytest.mark.parametrize("use", USES.values())
def test_whichever_is_used_there_is_one_error_that_says_to_make_it_again(
    pool3: Pool, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = fail(pool3, "if rank == 1: raise ValueError('typo')\ndist.barrier()")
    # on a busy machine too, all ranks find it by themselves
    monkeypatch.setattr(freeing, "GRACE_S", 5.0)
    try:
        pool3.run(use, timeout_s=20)
    except SpmdError as error:
        assert EARLIER in str(error)  # noqa: PT017 - a mesh of all ranks may find the new group
    else:
        assert "mesh" in use
    assert pool3.generation == generation  # what was made since is not lost by it
    pool3.run(HOLDERS)
    assert set(dict(pool3.run(USES["fsdp"])).values()) == {8.0}


def test_ranks_that_are_not_in_step_get_another_group(pool3: Pool) -> None:
    """A small broadcast is over on its source when it is sent: nobody waits, nothing is aborted."""
    fail(pool3, "if rank: raise ValueError('typo')\ndist.broadcast(torch.ones(1), src=0)")
    assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}


def test_a_rank_that_waits_in_the_store_of_the_group_is_freed(pool3: Pool) -> None:
    """As torch does on NCCL before the first message between two ranks."""
    pids = pool3.status().pids
    wait = "dist.distributed_c10d._get_default_store().get('nobody')"
    with pytest.raises(SpmdError, match="ZeroDivisionError") as caught:
        pool3.run(f"if rank == 1: {wait}\nelse: 1 / 0")
    assert caught.value.errors[1].freed
    assert pool3.status().pids == pids
    assert dict(pool3.run(SUM)) == dict.fromkeys(range(3), 3.0)
