"""This rank's share of a data set that can only be walked through. Runs on engines.

Every rank walks through the whole stream, cuts it into the same global batches and keeps its share
of each, so each sample is used once, and N ranks compute what one does: if the stream is the same
on every rank. One that shuffles must do so by the epoch (`set_epoch(epoch)` is called if it has
that) or by torch's random numbers, which are keyed here; one that splits itself by rank must not.
Each batch costs one small all-reduce, in which the ranks compare what came.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import torch

from gpupool.core.errors import SampleError, TrainingError
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data.reading.augmentation import keyed_draws
from gpupool.data.reading.batches import Reading, batch_of, no_sample
from gpupool.data.reading.samples import Draw, Skipped
from gpupool.data.reading.threads import read_ahead
from gpupool.data.reading.trees import tensors
from gpupool.data.stores.waiting import awaited
from gpupool.engine.batches.share import Share, cut_share
from gpupool.engine.group.forming import World


def stream_shares(
    dataset: Any,
    options: TrainingOptions,
    world: World,
    epoch: int,
    samples_done: int,
    draw: Draw,
) -> Generator[Share, None, None]:
    """This rank's share of each global batch of an epoch, read ahead by a thread.

    `samples_done` samples are walked through and not used.

    Raises TrainingError, on every rank, if not the same came on all, or nothing at all.
    """
    reading = Reading(draw, options.on_error == "skip", options.collate, world.device)
    samples = _samples(dataset, epoch, samples_done, reading)
    loading = read_ahead(_shares(samples, options, world, reading), reading)
    with closing(loading):
        for share, checksum in awaited(loading):
            _compare(checksum, world, epoch)
            if share is not None:
                yield share
            elif not samples_done:
                raise TrainingError(
                    f"the stream {type(dataset).__name__} gave no sample; if it was walked "
                    "through before, let its __iter__ start over each time."
                )


def _samples(dataset: Any, epoch: int, samples_done: int, reading: Reading) -> Iterator[Any]:
    """The samples of an epoch, or a `Skipped` for one that could not be read."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    stream = iter(dataset)
    number = 0
    while True:
        try:
            # Random numbers inside the stream's own `__iter__` are the same on every rank, too.
            with keyed_draws(reading.draw, number):
                sample = next(stream)
        except StopIteration:
            return
        except SampleError as error:
            if not reading.skip:
                raise
            sample = Skipped.of(error)
        if sample is None:  # for ranks count what comes, not what a function leaves of it
            raise no_sample(number)
        number += 1
        if number > samples_done:
            yield sample


def _shares(
    samples: Iterator[Any], options: TrainingOptions, world: World, reading: Reading
) -> Generator[tuple[Share | None, int], None, None]:
    """The share of each global batch, with a checksum of the whole; one None if nothing comes."""
    # One batch ahead, as only that shows whether a batch is the last one of the epoch.
    ahead = list(islice(samples, options.batch_size))
    if not ahead:
        yield None, 0
    spare: list[Any] = []  # a sample for a rank that has none of its own
    while ahead:
        came, ahead = ahead, list(islice(samples, options.batch_size))
        read = [sample for sample in came if not isinstance(sample, Skipped)]
        spare = read[:1] or spare
        if not spare:
            raise TrainingError(
                f"none of the first {len(came):,} samples of the stream could be read."
            )
        mine, sizes = cut_share(np.arange(len(came)), world, options)
        own = batch_of([came[place] for place in mine], reading.pin, reading.collate)
        held = own if own.num else batch_of(spare, reading.pin, reading.collate)
        share = Share(
            held.inputs,
            held.targets,
            own.num,
            len(came),
            skipped=own.skipped,
            is_last=not ahead,
            part_sizes=sizes,
        )
        yield share, _checksum(read, share.num_all, share.is_last)


def _checksum(samples: list[Any], *of_batch: object) -> int:
    """Of a batch and its targets, which are small: in which order they came, and which.

    Of samples that are no pairs, of all that is in them.
    """
    targets = [
        sample[1] if isinstance(sample, (tuple, list)) and len(sample) == 2 else sample
        for sample in samples
    ]
    parts = [tensor.cpu().double().numpy().tobytes() for tensor in tensors(targets)]
    content = b"".join(parts) or repr(targets).encode()
    return zlib.crc32(content + repr(of_batch).encode()) & 0xFFFFF  # so that squares are exact


def _compare(checksum: int, world: World, epoch: int) -> None:
    """Raises TrainingError, on every rank, if the ranks have not read the same."""
    here = torch.tensor([checksum, checksum**2], dtype=torch.float64, device=world.device)
    # All are equal exactly if the variance is 0, which one sum over the ranks shows.
    total, squares = world.sum(here).tolist()
    if total**2 != squares * world.size:
        raise TrainingError(
            f"epoch {epoch}: the stream is not the same on every rank, in one batch other samples "
            "came, or more of them. Let it shuffle by the epoch (set_epoch) or by torch's random "
            "numbers, and not split itself by rank: gpupool does that."
        )
