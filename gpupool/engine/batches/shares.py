"""This rank's share of every global batch of an epoch, on its device. Runs on engines."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice

import numpy as np

from gpupool.core.errors import TrainingError
from gpupool.core.options.datasets import is_stream
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data.reading.batches import Batch
from gpupool.data.reading.loader import load_batches
from gpupool.data.reading.normalization import Normalization
from gpupool.data.reading.samples import Draw
from gpupool.data.reading.shards import Indices
from gpupool.data.reading.subsets import opened
from gpupool.data.stores.waiting import awaited
from gpupool.engine.batches.form import PLAIN, BatchForm
from gpupool.engine.batches.order import epoch_batches
from gpupool.engine.batches.share import Dataset, Share, cut_share, normalization_of, on_device
from gpupool.engine.batches.stream import stream_shares
from gpupool.engine.group.forming import World

_MAX_TRIED = 1000  # samples, when not one of a share could be read


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

    They are read ahead, and as many on every rank. `draw` keys the random numbers of augmentation:
    those of (seed, epoch) unless given. Inputs get the `normalization`, or the one that the data
    set asks for. `form`: how a batch is used.
    """
    draw = draw or Draw(options.seed, epoch)
    read = stream_shares if is_stream(dataset) else _indexed_shares
    scaling = normalization_of(opened(dataset), world.device, normalization)
    asked = time.perf_counter()
    # Closed here, as a traceback may hold this frame.
    with closing(read(dataset, options, world, epoch, samples_done, draw)) as shares:
        for share in shares:
            inputs, targets = on_device(share, world, form, scaling)
            wait_s = time.perf_counter() - asked
            yield replace(share, inputs=inputs, targets=targets, wait_s=wait_s)
            del share, inputs, targets
            asked = time.perf_counter()  # the step in between is no wait for data


def _indexed_shares(
    dataset: Dataset,
    options: TrainingOptions,
    world: World,
    epoch: int,
    samples_done: int,
    draw: Draw,
) -> Generator[Share, None, None]:
    """Those of a data set that has an index: each rank reads its own samples."""
    batches = epoch_batches(dataset, options, epoch, samples_done)
    cuts = [cut_share(batch, world, options) for batch in batches]
    # A rank without samples of its own takes part with the first one of the batch.
    pairs = list(zip(batches, cuts, strict=True))
    wanted = [mine if len(mine) else batch[:1] for batch, (mine, _) in pairs]
    loading = load_batches(
        dataset,
        wanted,
        device=world.device,
        draw=draw,
        skip=options.on_error == "skip",
        collate=options.collate,
        workers=options.workers,
    )
    spare: Batch | None = None
    with closing(loading):
        found = zip(pairs, awaited(loading), strict=True)
        for number, ((batch, (mine, sizes)), loaded) in enumerate(found, start=1):
            assert loaded is not None  # something is wanted of each batch
            if not loaded.num and spare is None:
                spare = _any_sample(dataset, batch, options, world)
            held = loaded if loaded.num or spare is None else spare
            yield Share(
                held.inputs,
                held.targets,
                loaded.num if len(mine) else 0,
                len(batch),
                skipped=loaded.skipped if len(mine) else (),
                is_last=number == len(batches),
                part_sizes=sizes,
            )


def _any_sample(dataset: Dataset, batch: Indices, options: TrainingOptions, world: World) -> Batch:
    """A batch of one, for a rank not one of whose samples could be read."""
    others = islice(chain(batch, range(len(dataset))), _MAX_TRIED)
    tried = [np.array([index]) for index in others]
    # Not keyed: for that it would set generators that the threads watch.
    reading = load_batches(
        dataset, tried, depth=0, device=world.device, skip=True, collate=options.collate
    )
    for loaded in awaited(reading):
        if loaded is not None and loaded.num:
            return loaded
    raise TrainingError(
        f"no sample could be read in {len(tried):,} tries, so there is nothing to train on; "
        "on_error='raise' says what is wrong with the first of them."
    )
