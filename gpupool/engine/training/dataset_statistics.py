"""Statistics over all training data, by all ranks together. Runs on engines; knows only torch."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from gpupool.core.errors import OptionsError
from gpupool.core.options.datasets import in_order
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data.reading.normalization import Normalization
from gpupool.data.reading.samples import Draw
from gpupool.engine.batches.form import PLAIN, BatchForm
from gpupool.engine.batches.share import Dataset
from gpupool.engine.batches.shares import epoch_shares
from gpupool.engine.group.forming import World


class _Moments(NamedTuple):
    """How many values a channel has, their mean, and their squared deviations from it."""

    num: int
    mean: Tensor
    deviations: Tensor

    def joined(self, other: _Moments) -> _Moments:
        """Those of both (Chan, Golub and LeVeque 1983, formula 2.1)."""
        num, apart = self.num + other.num, other.mean - self.mean
        mean = self.mean + apart * (other.num / max(num, 1))
        between = apart.square() * (self.num * other.num / max(num, 1))
        return _Moments(num, mean, self.deviations + other.deviations + between)


_NOTHING = _Moments(0, *torch.zeros(2, dtype=torch.float64, device="cpu"))


def fit_normalization(
    dataset: Dataset, options: TrainingOptions, world: World, form: BatchForm = PLAIN
) -> Normalization:
    """Mean and standard deviation of each channel of the inputs; one pass over the data.

    Of inputs (N, channels, ...), uint8 ones in 0..1; a channel that never changes has 1.

    Raises OptionsError if the inputs are no single tensor, or are normalised already.
    """
    if getattr(dataset, "normalization", None) is not None:
        raise OptionsError(
            "normalize='fit' for data that has with_normalization already: leave one of them out."
        )
    here = _NOTHING
    options = in_order(options)
    draw = Draw(options.seed, 0)
    for share in epoch_shares(dataset, options, world, 1, draw=draw, form=form):
        if not isinstance(share.inputs, Tensor) or share.inputs.ndim < 2:
            raise OptionsError(
                "normalize='fit' needs inputs that are one tensor of channels, such as images; "
                "normalize others in a transform."
            )
        if share.num_here:
            here = here.joined(_moments(share.inputs.double()))
    of_ranks = world.gather(_Moments(here.num, here.mean.cpu(), here.deviations.cpu()))
    every = reduce(_Moments.joined, of_ranks, _NOTHING)
    std = (every.deviations / every.num).sqrt()
    std = std.where(std > 0, 1.0)  # a channel that never changes becomes 0, not NaN
    return Normalization(tuple(every.mean.tolist()), tuple(std.tolist()))


def _moments(inputs: Tensor) -> _Moments:
    num = inputs.numel() // inputs.shape[1]
    dims = [dim for dim in range(inputs.ndim) if dim != 1]
    var, mean = torch.var_mean(inputs, dims, correction=0)
    return _Moments(num, mean, var * num)
