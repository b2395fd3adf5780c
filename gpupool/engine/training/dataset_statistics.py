"""Statistics over all training data, by all ranks together. Runs on engines; knows only torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpupool.core.errors import OptionsError
from gpupool.core.options.sampling import in_order
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data.reading.normalization import Normalization
from gpupool.data.reading.samples import Draw
from gpupool.engine.batches.form import PLAIN, BatchForm, called
from gpupool.engine.batches.share import Dataset
from gpupool.engine.batches.shares import epoch_shares
from gpupool.engine.group.forming import World
from gpupool.engine.numerics.batch_norm import Population, collecting, counting, norm_group
from gpupool.engine.numerics.forward import autocast
from gpupool.engine.training.run import set_training


def recompute_statistics(
    model: nn.Module,
    dataset: Dataset,
    options: TrainingOptions,
    world: World,
    normalization: Normalization | None = None,
    form: BatchForm = PLAIN,
) -> None:
    """Give batch norms that train the mean and variance of all training data; one pass over it.

    Each batch is normalised by its own statistics, over all ranks, and all of them are put
    together: the result does not depend on the number of ranks.
    """
    # Frozen batch norms keep their statistics, as in training.
    set_training(model)
    options = in_order(options)
    with collecting(model, norm_group(world)), torch.no_grad():
        for share in epoch_shares(
            dataset,
            options,
            world,
            1,
            draw=Draw(options.seed, 0),
            normalization=normalization,
            form=form,
        ):
            with counting(share.num_here > 0), autocast(world.device, options.precision):
                called(model, share.inputs)


def fit_normalization(
    dataset: Dataset, options: TrainingOptions, world: World, form: BatchForm = PLAIN
) -> Normalization:
    """Mean and standard deviation of each channel of the inputs; one pass over the data.

    Of inputs (N, channels, ...), uint8 ones in 0..1; a channel that never changes has 1.

    Raises OptionsError if the inputs are no single tensor, or are normalised already.
    """
    if getattr(dataset, "normalization", None) is not None:
        raise OptionsError(
            "normalize='fit' for data that has with_normalization already: leave one of them out.",
            "conflict",
            "normalize",
        )
    found = Population()
    options = in_order(options)
    draw = Draw(options.seed, 0)
    for share in epoch_shares(dataset, options, world, 1, draw=draw, form=form):
        if not isinstance(share.inputs, Tensor) or share.inputs.ndim < 2:
            raise OptionsError(
                "normalize='fit' needs inputs that are one tensor of channels, such as images; "
                "normalize others in a transform.",
                "no channels",
                "normalize",
            )
        if share.num_here:
            inputs = share.inputs.double()
            dims = [dim for dim in range(inputs.ndim) if dim != 1]
            var, mean = torch.var_mean(inputs, dims, correction=0)
            found.add(torch.tensor(inputs.numel() / inputs.shape[1]).to(mean), mean, var)
    # Counts, means and squared deviations of the ranks, put together: exact for uneven shares.
    parts = world.gather((found.num.item(), found.mean.tolist(), found.deviations.tolist()))
    every = Population()
    for num, mean_here, deviations in parts:
        if num:
            var = torch.tensor(deviations, dtype=torch.float64) / num
            every.add(torch.tensor(num), torch.tensor(mean_here, dtype=torch.float64), var)
    std = (every.deviations / every.num).sqrt()
    std = std.where(std > 0, 1.0)  # a channel that never changes becomes 0, not NaN
    return Normalization(tuple(every.mean.tolist()), tuple(std.tolist()))
