"""Mean and deviation of all training inputs, by all ranks together. Runs on engines."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpupool.core.errors import OptionsError
from gpupool.core.options.datasets import in_order
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data.reading.samples import Draw
from gpupool.engine.batches.form import BatchForm
from gpupool.engine.batches.share import Dataset
from gpupool.engine.batches.shares import epoch_shares
from gpupool.engine.group.forming import World

Moments = tuple[int, Tensor, Tensor]  # how many values a channel has, their mean and variance
Scaling = tuple[tuple[float, ...], tuple[float, ...]]


def fit_normalization(
    dataset: Dataset, options: TrainingOptions, world: World, form: BatchForm
) -> Scaling:
    """Mean and standard deviation of each channel of the inputs; one pass over the data.

    Of inputs (N, channels, ...), uint8 ones in 0..1; a channel that never changes has 1.

    Raises OptionsError if the inputs are no single tensor, or are normalised already.
    """
    if getattr(dataset, "normalization", None) is not None:
        raise OptionsError(
            "normalize='fit' for data that has with_normalization already: leave one of them out."
        )
    here: list[Moments] = []
    draw = Draw(options.seed, 0)
    for share in epoch_shares(dataset, in_order(options), world, 1, draw=draw, form=form):
        if not isinstance(share.inputs, Tensor) or share.inputs.ndim < 2:
            raise OptionsError(
                "normalize='fit' needs inputs that are one tensor of channels, such as images; "
                "normalize others in a transform."
            )
        if share.num_here:
            values = share.inputs.double().transpose(0, 1).flatten(1)
            var, mean = torch.var_mean(values, 1, correction=0)
            here = [_joined([*here, (values.shape[1], mean.cpu(), var.cpu())])]
    _, mean, var = _joined([one for of_rank in world.gather(here) for one in of_rank])
    # A channel that never changes becomes 0, not NaN.
    return tuple(mean.tolist()), tuple(var.sqrt().where(var > 0, 1.0).tolist())


def _joined(parts: Sequence[Moments]) -> Moments:
    nums = torch.tensor([num for num, _, _ in parts], dtype=torch.float64)
    means = torch.stack([mean for _, mean, _ in parts])
    variances = torch.stack([variance for _, _, variance in parts])
    shares = (nums / nums.sum())[:, None]
    mean = (means * shares).sum(0)
    return int(nums.sum()), mean, ((variances + (means - mean).square()) * shares).sum(0)
