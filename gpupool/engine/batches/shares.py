"""This rank's share of every global batch, on its device. Runs on engines."""

from __future__ import annotations

from collections.abc import Iterator

from gpupool.core.options.datasets import is_stream
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data.reading.normalization import Normalization
from gpupool.data.reading.samples import Draw
from gpupool.engine.batches.form import PLAIN, BatchForm
from gpupool.engine.batches.map_style import load_shares
from gpupool.engine.batches.order import epoch_batches
from gpupool.engine.batches.share import Dataset, Share, parts_of_batch
from gpupool.engine.batches.stream import stream_shares
from gpupool.engine.group.forming import World


def epoch_shares(
    dataset: Dataset,
    options: TrainingOptions,
    world: World,
    epoch: int,
    samples_done: int = 0,
    draw: Draw | None = None,
    normalization: Normalization | None = None,
    form: BatchForm = PLAIN,
) -> Iterator[Share]:
    """This rank's share of each global batch of an epoch, after its first `samples_done` samples.

    `draw` keys the random numbers of augmentation: those of (seed, epoch) unless given. Inputs get
    the `normalization`, or the one that the data set asks for. `form`: how a batch is used.
    """
    draw = draw or Draw(options.seed, epoch)
    if is_stream(dataset):  # it has no index: every rank reads all of it
        return stream_shares(
            dataset, options, world, epoch, samples_done, draw, normalization, form
        )
    batches = epoch_batches(dataset, options, epoch, samples_done)
    return load_shares(
        dataset,
        batches,
        world,
        draw,
        skip=options.on_error == "skip",
        normalization=normalization,
        num_parts=parts_of_batch(options),
        collate=options.collate,
        form=form,
        workers=options.workers,
    )
