"""What a batch norm does with all its numbers: four passes over them. Runs on engines.

torch has a fused kernel for each, for GPUs alone; elsewhere a pass is made of its operators. Both
compute the same formulas, those of aten's Normalization.cuh:

    output    = (x - mean) * invstd * weight + bias
    gradient  = (g - sum(g) / n - (x - mean) * invstd^2 * sum(g (x - mean)) / n) * invstd * weight

What the ranks exchange between the passes is of the size of a channel, and is computed in
`batch_norm.py` for both. torch's own kernel for that, batch_norm_gather_stats_with_counts, divides
by the number of rows that came so far: it gives NaN where the first rank has none.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_TINY = 1e-12  # torch's kernel gives 1 / sqrt(variance + this), and 0 for a variance of 0 without
_BY_PIXEL = {4: torch.channels_last, 5: torch.channels_last_3d}


class Passes:
    """Passes over `x`, of any layout; statistics are in float32 at least, as under autocast."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.dtype = torch.promote_types(x.dtype, torch.float32)
        self.num_values = x.numel() // x.shape[1]  # of a channel
        self._dims = [dim for dim in range(x.ndim) if dim != 1]
        self._grad = self._apart = x  # of the way back

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each channel."""
        var, mean = torch.var_mean(self.x.to(self.dtype), self._dims, correction=0)
        return mean, var

    def normalized(
        self, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """The output, of the type of `x`."""
        factor = invstd if weight is None else invstd * weight
        shift = -mean * factor if bias is None else bias - mean * factor
        x = self.x.to(self.dtype)
        return torch.addcmul(self._along(shift), x, self._along(factor)).to(self.x.dtype)

    def sums(
        self, grad: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Of each channel the sum of `grad`, the gradient of the output, and of `grad` (x - mean).

        Comes before `gradient`.
        """
        self._grad, self._apart = grad.to(self.dtype), self.x.to(self.dtype) - self._along(mean)
        return self._grad.sum(self._dims), (self._grad * self._apart).sum(self._dims)

    def gradient(
        self,
        mean: Tensor,
        invstd: Tensor,
        weight: Tensor | None,
        sums: tuple[Tensor, Tensor],
        num: Tensor,
    ) -> Tensor:
        """That of `x`, from the `sums` of all ranks, which have `num` values of each channel."""
        of_grad, of_product = (one / num for one in sums)
        slope = self._along(of_product * invstd.square())
        factor = invstd if weight is None else invstd * weight
        inner = (self._grad - self._along(of_grad)).addcmul_(self._apart, slope, value=-1)
        return inner.mul_(self._along(factor)).to(self.x.dtype)

    def _along(self, channels: Tensor) -> Tensor:
        return channels.view(-1, *[1] * (self.x.ndim - 2))


class FusedPasses(Passes):
    """The same by torch's kernels, each of which reads its numbers once."""

    def __init__(self, x: Tensor) -> None:
        by_pixel = _BY_PIXEL.get(x.ndim, torch.contiguous_format)
        is_so = x.is_contiguous(memory_format=by_pixel)
        self._layout = by_pixel if is_so else torch.contiguous_format
        super().__init__(x.contiguous(memory_format=self._layout))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each channel."""
        mean, invstd = torch.batch_norm_stats(self.x, _TINY)
        return mean, (invstd.pow(-2) - _TINY).clamp_(min=0)

    def normalized(
        self, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """The output, of the type of `x`."""
        weight, bias = self._precise(weight), self._precise(bias)
        return torch.batch_norm_elemt(self.x, weight, bias, mean, invstd, _TINY)

    def sums(
        self, grad: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Of each channel the sum of `grad`, the gradient of the output, and of `grad` (x - mean).

        Comes before `gradient`.
        """
        # of one layout: one kernel reads both as the gradient is laid out
        self._grad = grad.to(self.x.dtype).contiguous(memory_format=self._layout)
        found = torch.batch_norm_backward_reduce(
            self._grad, self.x, mean, invstd, self._precise(weight), True, False, False
        )
        return found[0], found[1]

    def gradient(
        self,
        mean: Tensor,
        invstd: Tensor,
        weight: Tensor | None,
        sums: tuple[Tensor, Tensor],
        num: Tensor,
    ) -> Tensor:
        """That of `x`, from the `sums` of all ranks, which have `num` values of each channel."""
        # The kernel adds up the numbers of ranks; here they are added up already.
        nums = num.to(torch.int32).view(1)
        return torch.batch_norm_backward_elemt(
            self._grad, self.x, mean, invstd, self._precise(weight), *sums, nums
        )

    def _precise(self, channels: Tensor | None) -> Tensor | None:
        """As the statistics are: the kernels know no other mixture of types."""
        return None if channels is None else channels.to(self.dtype)


def passes_over(x: Tensor) -> Passes:
    """By kernels, where torch has some for the device."""
    return FusedPasses(x) if x.numel() and _has_kernels(x.device.type.upper()) else Passes(x)


@cache
def _has_kernels(key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::batch_norm_stats", key)
