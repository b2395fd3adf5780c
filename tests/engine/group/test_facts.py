"""What abort and re-form rely on in torch and gloo, which these do not promise.

One test names each fact, on ranks of plain torch. If one fails after an upgrade, then
`gpupool/engine/group/abort.py`, `gpupool/engine/group/forming.py` or
`gpupool/pool/calls/execution.py` has to change.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gpupool.engine.group.gloo_sockets import gloo_connections
from tests.engine.group.torch_ranks import run_ranks

_c10d: Any = distributed_c10d

# ---- gloo's sockets --------------------------------------------------------------------------


def num_connections() -> int:
    with gloo_connections() as connections:
        return len(connections)


def count_connections(rank: int) -> list[int]:
    counts = [num_connections()]
    sub = dist.new_group()
    counts.append(num_connections())
    dist.all_reduce(torch.ones(1), group=sub)
    return [*counts, num_connections()]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_group_has_a_connection_to_every_other_rank_before_its_first_collective(n: int) -> None:
    assert run_ranks(count_connections, n=n) == [[n - 1, 2 * (n - 1), 2 * (n - 1)]] * n


def test_rpc_lets_go_of_references_by_one_function_that_takes_a_time() -> None:
    from torch.distributed.rpc import api

    rpc: Any = api
    said = rpc._delete_all_user_and_unforked_owner_rrefs.__doc__
    assert "(timeout: datetime.timedelta = " in said
    assert "_delete_all_user_and_unforked_owner_rrefs()" in inspect.getsource(rpc.shutdown)
    assert not rpc._ALL_WORKER_NAMES


# ---- where groups are made -------------------------------------------------------------------


def made_by_one_function(rank: int) -> list[int]:
    """How often torch's function that makes groups was called, after each way to make some."""
    from torch.distributed.device_mesh import init_device_mesh

    make, made, counts = _c10d._new_process_group_helper, list[str](), list[int]()

    def making(*args: Any, **options: Any) -> Any:
        made.append(args[5])  # its name; the store stands before it
        return make(*args, **options)

    _c10d._new_process_group_helper = making
    for way in (
        dist.new_group,
        lambda: dist.new_subgroups(1),
        lambda: init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b")),
    ):
        way()
        counts.append(len(made))
    return counts


def test_all_groups_are_made_by_one_function_of_torch() -> None:
    for new_group, new_subgroups, mesh in run_ranks(made_by_one_function):
        assert 0 < new_group < new_subgroups < mesh
