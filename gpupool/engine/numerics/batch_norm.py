"""Batch norm over the whole batch that the ranks hold together, on any backend. Runs on engines.

torch's own SyncBatchNorm wants GPUs, and counts every row. Here the ranks exchange how many values
a channel has, their mean and their squared deviations (Chan, Golub and LeVeque 1983, "Algorithms
for computing the sample variance", formula 2.1), so that uneven shares give what one process gives,
and a placeholder for an empty share counts nothing. On GPUs it works by torch's fused kernels.

    model = sync_batch_norm(model)          # before DistributedDataParallel
    with counting(share.num_here > 0):
        outputs = model(share.inputs)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _BatchNorm

from gpupool.core.errors import TrainingError
from gpupool.engine.group.forming import training_group
from gpupool.engine.numerics.batch_norm_passes import Passes, passes_over

Group = dist.ProcessGroup | None  # None: of the ranks that train

_counts = True  # whether the rows that pass through now do


@contextmanager
def counting(rows: bool) -> Iterator[None]:
    """While this lasts, the rows that pass through a synchronised batch norm count, or do not."""
    global _counts
    before, _counts = _counts, rows
    try:
        yield
    finally:
        _counts = before


class SyncBatchNorm(_BatchNorm):
    """A batch norm of any number of dimensions, over the rows of all ranks while it trains.

    Made by `sync_batch_norm` of another one, whose parameters and buffers it has.
    """

    group: Group = None
    was: type[_BatchNorm] = nn.BatchNorm2d

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"a batch norm needs rows of channels, and not shape {input.shape}")

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the default group: one of torch's cannot be copied."""
        return {name: value for name, value in vars(self).items() if name != "group"}

    def forward(self, input: Tensor) -> Tensor:
        """Normalised `input`, of its shape and type. `torch.compile` leaves it as it is."""
        outputs: Tensor
        if not self.training:
            outputs = super().forward(input)
            return outputs
        self._check_input_dim(input)
        outputs = self._apart(input) if torch.compiler.is_compiling() else self._normalize(input)
        return outputs

    def _normalize(self, input: Tensor) -> Tensor:
        outputs: Tensor
        outputs, num, mean, var = _Normalize.apply(
            input, self.weight, self.bias, self.eps, _counts, self.group
        )
        if self.running_mean is not None:
            self._track(num, mean, var)
        return outputs

    # Not compiled. torch.compiler.disable would import the compiler (a second) in every process
    # that imports this module; this does when it is called.
    _apart = _disable_dynamo(_normalize)

    def _track(self, num: Tensor, mean: Tensor, var: Tensor) -> None:
        """The running statistics: as torch's, with the unbiased variance."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        # Computed with tensors throughout: to read `num` would make the host wait for the GPU.
        self.num_batches_tracked.add_(num > 0)
        weight = torch.full_like(num, self.momentum or 0.0)
        if self.momentum is None:
            weight = 1 / self.num_batches_tracked.to(num.dtype)
        weight = (weight * (num > 0)).to(self.running_mean.dtype)
        self.running_mean.lerp_(mean.to(weight.dtype), weight)
        self.running_var.lerp_(_unbiased(var, num).to(weight.dtype), weight)


def sync_batch_norm(model: nn.Module, group: Group = None) -> nn.Module:
    """Make every batch norm of `model` one over all ranks of `group`; returns `model`.

    The modules stay the same objects, with the same names and parameters. `group`: that of the
    ranks that train, unless given. Where there is no process group they do what they did.

    Raises:
        TrainingError: a batch norm with a forward of its own, which this cannot stand for.
    """
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or isinstance(module, SyncBatchNorm):
            continue
        if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            raise TrainingError(
                f"the batch norm {name!r} is a {type(module).__name__} with a forward of its own, "
                "which cannot be synchronised: choose batch_norm='local' or 'frozen', or a "
                "torch.nn.BatchNorm."
            )
        was = type(module)
        module.__class__ = SyncBatchNorm  # keeps hooks, and who else refers to it
        module.was, module.group = was, group  # type: ignore[assignment]
    return model


def plain_batch_norm(model: nn.Module) -> nn.Module:
    """Make the batch norms of `model` what they were before `sync_batch_norm`; returns `model`."""
    for module in model.modules():
        if isinstance(module, SyncBatchNorm):
            was = module.was
            for name in ("was", "group"):
                vars(module).pop(name, None)
            module.__class__ = was  # type: ignore[assignment]
    return model


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Its batch norms, in order."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def _unbiased(var: Tensor, num: Tensor) -> Tensor:
    return var * (num / (num - 1).clamp(min=1))


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias, with mean and var over all ranks.

    Gives that, and how many values a channel has, their mean and biased variance. The gradient is
    that of the sum of all ranks' losses.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        counts: bool,
        group: Group,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        passes = passes_over(x)
        num, mean, var = _statistics(passes, counts, group)
        invstd = torch.rsqrt(var + eps)
        ctx.save_for_backward(passes.x, weight, mean, invstd, num)
        ctx.counts, ctx.group = counts, group
        outputs = passes.normalized(mean, invstd, weight, bias)
        ctx.mark_non_differentiable(num, mean, var)
        return outputs, num, mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, num = ctx.saved_tensors
        passes = passes_over(x)
        sums = torch.cat(passes.sums(grads[0], mean, invstd, weight))
        if not ctx.counts:
            sums.zero_()
        own_bias, own_weight = sums.chunk(2)
        # Of weight and bias each rank gives its own part: DDP averages those.
        own_weight = own_weight * invstd
        # The ranks need each other's sums, as each output depends on all ranks' inputs.
        of_grad, of_product = _sum(sums.clone(), ctx.group).chunk(2)
        all_sums = of_grad, of_product
        of_x = (
            passes.gradient(mean, invstd, weight, all_sums, num.clamp(min=1))
            if ctx.counts
            else torch.zeros_like(x)
        )
        has_affine = weight is not None
        return (
            of_x,
            own_weight.to(weight.dtype) if has_affine else None,
            own_bias.to(weight.dtype) if has_affine else None,
            None,
            None,
            None,
        )


def _statistics(passes: Passes, counts: bool, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Values a channel, mean and biased variance over the counting rows of all ranks."""
    size, device = passes.x.shape[1], passes.x.device
    own = torch.zeros(2 * size + 1, dtype=passes.dtype, device=device)
    if counts:
        mean, var = passes.moments()
        here = torch.full((1,), passes.num_values, dtype=passes.dtype, device=device)
        own = torch.cat([mean, var * passes.num_values, here])
    # One collective: mean, squared deviations and number of values of each rank in one row.
    every = _gather(own, group)
    means, deviations, nums = every[:, :size], every[:, size:-1], every[:, -1:]
    num = nums.sum()
    known = num.clamp(min=1)
    mean = (means * nums).sum(0) / known
    var = (deviations + nums * (means - mean).square()).sum(0) / known
    return num, mean, var


def _gather(own: Tensor, of: Group) -> Tensor:
    """`own` of every rank, shape (ranks, len(own))."""
    group, size = _group_of(of)
    if size == 1:
        return own[None]
    every = own.new_empty(size, len(own))
    dist.all_gather(list(every), own, group=group)
    return every


def _sum(own: Tensor, of: Group) -> Tensor:
    group, size = _group_of(of)
    if size > 1:
        dist.all_reduce(own, group=group)
    return own


def _group_of(group: Group) -> tuple[dist.ProcessGroup | None, int]:
    if not dist.is_initialized():
        return None, 1
    group = group or training_group()
    return group, dist.get_world_size(group)
