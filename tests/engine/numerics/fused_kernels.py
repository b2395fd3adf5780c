"""In the place of torch's fused kernels of batch norm, which are for GPUs alone: the same, on CPUs.

Written from the CUDA sources (aten's Normalization.cu and .cuh), with what these ask of their
arguments: other types, layouts or orders are an error here, where a GPU would read nonsense.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpupool.engine.numerics.batch_norm import counting, sync_batch_norm
from gpupool.engine.numerics.batch_norm_passes import FusedPasses, passes_over
from tests.engine.numerics import norms

_LAYOUTS = torch.contiguous_format, torch.channels_last
_calls: set[str] = set()


def _dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _along(channels: Tensor, x: Tensor) -> Tensor:
    return channels.view(-1, *[1] * (x.ndim - 2))


def _precise(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _check(x: Tensor, *channels: Tensor | None, grad: Tensor | None = None) -> None:
    layouts = torch.contiguous_format, torch.channels_last, torch.channels_last_3d
    dense = [f for f in layouts[: max(1, x.ndim - 2)] if x.is_contiguous(memory_format=f)]
    assert dense
    for one in channels:
        assert one is None or (one.dtype, one.shape) == (_precise(x), x.shape[1:2])
    if grad is not None:
        assert (grad.dtype, grad.shape, grad.stride()) == (x.dtype, x.shape, x.stride())


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _calls.add("stats")
    _check(x)
    var, mean = torch.var_mean(x.to(_precise(x)), _dims(x), correction=0)
    return mean, torch.rsqrt(var + eps)


def elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    _calls.add("elemt")
    _check(x, weight, bias, mean, invstd)
    made = (x.to(_precise(x)) - _along(mean, x)) * _along(invstd, x)
    made = made if weight is None else made * _along(weight, x)
    return (made if bias is None else made + _along(bias, x)).to(x.dtype)


def backward_reduce(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _calls.add("backward_reduce")
    _check(x, mean, invstd, weight, grad=grad)
    assert input_g
    apart = x.to(_precise(x)) - _along(mean, x)
    sums = grad.to(apart.dtype).sum(_dims(x)), (grad * apart).sum(_dims(x))
    return *sums, sums[1] * invstd, sums[0].clone()


def backward_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    _calls.add("backward_elemt")
    _check(x, mean, invstd, weight, sum_dy, sum_dy_xmu, grad=grad)
    assert count.dtype == torch.int32
    total = count.sum().to(mean.dtype)
    apart = x.to(mean.dtype) - _along(mean, x)
    slope = _along(sum_dy_xmu / total * invstd.square(), x)
    inner = grad.to(mean.dtype) - _along(sum_dy / total, x) - apart * slope
    return (inner * _along(invstd if weight is None else invstd * weight, x)).to(x.dtype)


def on_cpus() -> torch.library.Library:
    """torch has them on CPUs too, while this is kept."""
    library = torch.library.Library("aten", "IMPL")
    for function in (stats, elemt, backward_reduce, backward_elemt):
        library.impl(f"batch_norm_{function.__name__}", function, "CPU")
    return library


def differences(rank: int) -> tuple[dict[str, float], float, int]:
    """On a rank, a process of its own: those of `norms` of every kind, and of types and layouts."""
    library = on_cpus()
    assert isinstance(passes_over(torch.zeros(2, 3)), FusedPasses)
    found = {kind: norms.differences(kind) for kind in norms.KINDS}
    layouts = max(_of_layouts())
    del library
    return found, layouts, len(_calls)


def _of_layouts() -> list[float]:
    """Inputs and gradients laid out each in its own way, in multiples of the type's precision.

    The first rank has all rows.
    """
    apart, has_rows = [0.0], dist.get_rank() == 0
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        x, slope = torch.randn(2, 3, 4, 5, 6, dtype=torch.float64).to(dtype).unbind()
        exact = x.double().requires_grad_()
        expected = nn.BatchNorm2d(4).double()(exact)
        (gradient,) = torch.autograd.grad(expected, exact, slope.double())
        synced = sync_batch_norm(nn.BatchNorm2d(4)).to(torch.promote_types(dtype, torch.float32))
        for layout, other in (_LAYOUTS, _LAYOUTS[::-1]):
            inputs = x.contiguous(memory_format=layout).requires_grad_()
            with counting(has_rows):
                outputs = synced(inputs)
            assert outputs.is_contiguous(memory_format=layout)
            (own,) = torch.autograd.grad(outputs, inputs, slope.contiguous(memory_format=other))
            if has_rows:
                for found, wanted in ((outputs, expected), (own, gradient)):
                    difference = (found.double() - wanted).abs().max().item()
                    apart.append(difference / torch.finfo(dtype).eps)
            else:
                assert not own.any()
    return apart
