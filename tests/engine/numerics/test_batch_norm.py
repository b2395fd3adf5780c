"""Batch norm over all ranks is batch norm of the whole batch, whatever the shares."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpupool import TrainingError, TrainingOptions
from gpupool.data.reading import shards
from gpupool.engine.group.forming import World
from gpupool.engine.numerics.batch_norm import (
    SyncBatchNorm,
    counting,
    plain_batch_norm,
    sync_batch_norm,
)
from gpupool.engine.numerics.ddp import StepBuffers
from tests.support.pools import Pools
from tests.support.raising import raises

KINDS: dict[str, tuple[type[nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "1d": (nn.BatchNorm1d, (), {}),
    "1d with length": (nn.BatchNorm1d, (5,), {}),
    "3d": (nn.BatchNorm3d, (2, 3, 2), {}),
    "cumulative": (nn.BatchNorm2d, (3, 2), {"momentum": None}),
    "untracked": (nn.BatchNorm2d, (3, 2), {"track_running_stats": False}),
    "without weights": (nn.BatchNorm2d, (3, 2), {"affine": False}),
}


def difference(kind: str) -> float:
    """The largest one, of outputs, gradients and buffers, to torch's with the whole batch."""
    make, inner, settings = KINDS[kind]
    torch.manual_seed(0)
    reference = make(4, **settings).double()
    for parameter in reference.parameters():
        parameter.data.uniform_(0.5, 2)
    synced = sync_batch_norm(copy.deepcopy(reference))
    apart: list[Tensor] = []
    for rows in (7, 2, 5):  # so that some shares are uneven or empty
        whole = torch.randn(rows, 4, *inner).double().mul_(3).add_(100)
        apart += _one_batch(reference, synced, whole)
    for own, other in zip(reference.buffers(), synced.buffers(), strict=True):
        apart.append((own - other).abs().max())
    return max(one.item() for one in apart)


def _one_batch(reference: nn.Module, synced: nn.Module, whole: Tensor) -> list[Tensor]:
    mine = shards.shard(torch.arange(len(whole)).numpy(), dist.get_rank(), dist.get_world_size())
    counts = len(mine) > 0
    rows = mine if counts else [0]  # a stand-in
    inputs, share = whole.clone().requires_grad_(), whole[rows].clone().requires_grad_()
    expected = reference(inputs)
    with counting(counts):
        found = synced(share)
    slope = torch.randn(whole.shape, dtype=whole.dtype)
    gradients = torch.autograd.grad((expected * slope).sum(), [inputs, *reference.parameters()])
    own = torch.autograd.grad(
        (found * slope[rows]).sum() * float(counts), [share, *synced.parameters()]
    )
    apart = []
    if counts:
        apart += [(found - expected[rows]).abs().max(), (own[0] - gradients[0][rows]).abs().max()]
    for whole_gradient, part in zip(gradients[1:], own[1:], strict=True):
        dist.all_reduce(part)
        apart.append((whole_gradient - part).abs().max())
    return apart


def test_outputs_gradients_and_statistics_are_those_of_the_whole_batch(pools: Pools) -> None:
    for kind in KINDS:
        for found in dict(pools[3].run(difference, kind)).values():
            assert found < 1e-12, kind


def test_large_means_do_not_cost_the_variance_nor_half_precision_the_sums() -> None:
    for kind, mean in ((torch.float32, 1e4), (torch.bfloat16, 100)):
        inputs = (torch.randn(64, 3) + mean).to(kind)
        outputs = sync_batch_norm(nn.BatchNorm1d(3))(inputs)
        exact = torch.nn.functional.batch_norm(inputs.double(), None, None, training=True)
        assert outputs.dtype == kind
        assert (outputs - exact).abs().max() < 0.02


def test_a_synchronised_norm_has_the_same_state_and_becomes_what_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    norm, keys = model[1], list(model.state_dict())
    assert sync_batch_norm(model) is model
    assert isinstance(model[1], SyncBatchNorm)
    assert model[1] is norm
    assert list(model.state_dict()) == keys
    assert isinstance(copy.deepcopy(model)[1], SyncBatchNorm)
    assert isinstance(pickle.loads(pickle.dumps(model))[1], SyncBatchNorm)
    assert type(plain_batch_norm(model)[1]) is nn.BatchNorm2d
    assert model[1] is norm


def test_a_norm_with_a_forward_of_its_own_is_refused_by_name() -> None:
    class Activated(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).relu()

    with raises(TrainingError, "0", " Activated "):
        sync_batch_norm(nn.Sequential(Activated(3)))


@pytest.mark.parametrize(
    ("num", "size", "ranks", "norm", "better"),
    [
        (1347, 64, 2, "local", 62),  # 3 are left; 63 leaves 24 and 62 leaves 45
        (129, 64, 1, "local", 51),
        (1347, 64, 2, "sync", None),
        (1344, 64, 2, "local", None),
        (1352, 64, 2, "local", None),  # 8 are left: 4 on a rank
        (9, 8, 2, "local", None),  # all batches are small
        (3, 64, 2, "local", None),  # there is no other batch
    ],
)
def test_a_last_batch_of_a_few_is_reported_with_a_better_size(
    num: int, size: int, ranks: int, norm: Any, better: int | None
) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    if norm == "sync":
        model = sync_batch_norm(model)
    options = TrainingOptions(batch_size=size, batch_norm=norm)
    told = StepBuffers(model, World(0, ranks, torch.device("cpu")), options).trouble(num)
    assert (f"batch_size={better} " in told) if better else not told
