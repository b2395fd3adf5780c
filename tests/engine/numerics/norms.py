"""Batch norms on the ranks against one process with the whole batch; the ranks import this."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpupool.data.reading import shards
from gpupool.engine.numerics.batch_norm import counting, sync_batch_norm

KINDS: dict[str, tuple[type[nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "1d": (nn.BatchNorm1d, (), {}),
    "1d with length": (nn.BatchNorm1d, (5,), {}),
    "3d": (nn.BatchNorm3d, (2, 3, 2), {}),
    "cumulative": (nn.BatchNorm2d, (3, 2), {"momentum": None}),
    "untracked": (nn.BatchNorm2d, (3, 2), {"track_running_stats": False}),
    "without weights": (nn.BatchNorm2d, (3, 2), {"affine": False}),
}
NUM_ROWS = (7, 2, 5)  # of the batches, so that some shares are uneven or empty


def differences(kind: str, dtype: torch.dtype = torch.float64) -> float:
    """The largest difference, of outputs, gradients and buffers, to torch's on the whole batch."""
    make, inner, settings = KINDS[kind]
    torch.manual_seed(0)
    reference = make(4, **settings).to(dtype)
    synced = make(4, **settings).to(dtype)
    if settings.get("affine", True):
        for own, other in zip(reference.parameters(), synced.parameters(), strict=True):
            own.data.uniform_(0.5, 2)
            other.data.copy_(own)
    synced = sync_batch_norm(synced)
    apart = [0.0]
    for rows in NUM_ROWS:
        whole = torch.randn(rows, 4, *inner, dtype=dtype).mul_(3).add_(100)
        apart += _one_batch(reference, synced, whole)
    for own, other in zip(reference.buffers(), synced.buffers(), strict=True):
        apart.append((own - other).abs().max().item())
    assert list(reference.state_dict()) == list(synced.state_dict())
    return max(apart)


def _one_batch(reference: nn.Module, synced: nn.Module, whole: Tensor) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = shards.shard(torch.arange(len(whole)).numpy(), rank, size)
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
    return [one.item() for one in apart]
