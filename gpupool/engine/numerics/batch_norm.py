"""Batch norm over the whole batch that the ranks hold together, on any backend. Runs on engines.

On GPUs it is torch's own, which counts the rows of each rank; a placeholder for an empty share
comes to it as no rows. torch has none for CPUs: there two sums over the ranks make the statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _BatchNorm

from gpupool.core.errors import TrainingError
from gpupool.engine.batches.gathering import Total
from gpupool.engine.group.forming import training_group

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

    Made by `sync_batch_norm` of another one, whose parameters and buffers it has. It is no
    `nn.SyncBatchNorm`, as DDP refuses these on CPUs.
    """

    was: type[_BatchNorm] = nn.BatchNorm2d
    _check_input_dim: Any = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels: Any = nn.SyncBatchNorm._check_non_zero_input_channels

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """What torch's forward looks for."""
        return training_group()

    def forward(self, input: Tensor) -> Tensor:
        """Normalised `input`, of its shape and type. `torch.compile` leaves it as it is."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        return self._apart(input) if torch.compiler.is_compiling() else self._normalize(input)

    def _normalize(self, input: Tensor) -> Tensor:
        if _counts and input.device.type != "cpu":
            return nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]
        # Statistics are in float32 at least, as those of other ranks are.
        rows = input.to(torch.promote_types(input.dtype, torch.float32))
        if input.device.type == "cpu":
            return self._by_sums(rows).to(input.dtype)
        outputs = nn.SyncBatchNorm.forward(self, rows[:0])  # type: ignore[arg-type]
        # In the graph, as the way back is a collective too.
        traced = torch.stack([0 * one.sum() for one in (outputs, *self.parameters())]).sum()
        return torch.zeros_like(input) + traced.to(input.dtype)

    # Not compiled. torch.compiler.disable would import the compiler (a second) in every process
    # that imports this module; this does when it is called.
    _apart = _disable_dynamo(_normalize)

    def _by_sums(self, input: Tensor) -> Tensor:
        """As of one process with the rows of all ranks."""
        x = input.movedim(1, -1)  # the channels last
        dims = list(range(x.ndim - 1))
        here = x.new_full((1,), x.numel() / x.shape[-1])
        found = self._total(torch.cat([x.sum(dims), here]) * _counts)
        num = found[-1].detach()
        mean = found[:-1] / num.clamp(min=1)
        apart = x - mean
        var = self._total(apart.square().sum(dims) * _counts) / num.clamp(min=1)
        if self.running_mean is not None and num:
            self._track(mean.detach(), var.detach() * num / (num - 1).clamp(min=1))
        factor = torch.rsqrt(var + self.eps)
        outputs = apart * (factor if self.weight is None else factor * self.weight)
        outputs = outputs if self.bias is None else outputs + self.bias
        return outputs.movedim(-1, 1).contiguous()

    def _total(self, own: Tensor) -> Tensor:
        if not dist.is_initialized() or dist.get_world_size(self.process_group) == 1:
            return own
        total: Tensor = Total.apply(own, self.process_group)
        return total

    def _track(self, mean: Tensor, var: Tensor) -> None:
        """The running statistics, as torch's: with the unbiased variance."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(var.to(self.running_var.dtype), weight)


def sync_batch_norm(model: nn.Module) -> nn.Module:
    """Make every batch norm of `model` one over all ranks that train; returns `model`.

    The modules stay the same objects, with the same names and parameters. Where there is no
    process group they do what they did. It comes before `DistributedDataParallel`.

    Raises TrainingError for a batch norm with a forward of its own, which this cannot stand for.
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
        module.was = was  # type: ignore[assignment]
    return model


def plain_batch_norm(model: nn.Module) -> nn.Module:
    """Make the batch norms of `model` what they were before `sync_batch_norm`; returns `model`."""
    for module in model.modules():
        if isinstance(module, SyncBatchNorm):
            module.__class__ = vars(module).pop("was")
    return model


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


@contextmanager
def evaluating(norms: Sequence[nn.Module], *, only_single: bool) -> Iterator[None]:
    """While this lasts, these batch norms are in evaluation mode.

    With `only_single` those alone that get one value a channel, which has no variance: torch
    refuses to train them on it.
    """
    norms = [norm for norm in norms if norm.training]
    hooks = [norm.register_forward_pre_hook(_evaluate_single) for norm in norms if only_single]
    for norm in norms:
        norm.training = only_single
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for norm in norms:
            norm.training = True


def _evaluate_single(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if inputs[0].numel() == inputs[0].shape[1]:
        module.training = False
