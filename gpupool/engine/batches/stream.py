"""This rank's share of a data set that can only be walked through. Runs on engines.

Every rank walks through the whole stream, cuts it into the same global batches and keeps its share
of each, so each sample is used once, and N ranks compute what one does: if the stream is the same
on every rank. One that shuffles must do so by the epoch (`set_epoch(epoch)` is called if it has
that) or by torch's random numbers, which are keyed here; one that splits itself by rank must not.
Each batch costs one small all-reduce, in which the ranks compare what came.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from gpupool.core.errors import SampleError, TrainingError
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data.reading import shards
from gpupool.data.reading.augmentation import keyed_draws
from gpupool.data.reading.collate import Batch, batch_of, no_sample
from gpupool.data.reading.normalization import Normalization
from gpupool.data.reading.rows import Reading
from gpupool.data.reading.samples import Draw, Skipped
from gpupool.data.reading.threads import read_ahead
from gpupool.data.reading.trees import tensors
from gpupool.data.stores.waiting import awaited
from gpupool.engine.batches import share
from gpupool.engine.batches.form import PLAIN, BatchForm
from gpupool.engine.batches.share import Share
from gpupool.engine.batches.transfer import moved
from gpupool.engine.group.forming import World


@dataclass(frozen=True, slots=True)
class _Cut:
    """One global batch of the stream, of which this rank keeps `batch`.

    `spare` is its first sample, as a batch of one; `checksum` is of all its targets; `part_sizes`
    as those of a `Share`.
    """

    batch: Batch
    spare: Batch
    num_all: int
    checksum: int
    is_last: bool
    part_sizes: tuple[int, ...]


def stream_shares(
    dataset: Any,
    options: TrainingOptions,
    world: World,
    epoch: int,
    samples_done: int,
    draw: Draw,
    normalization: Normalization | None = None,
    form: BatchForm = PLAIN,
) -> Iterator[Share]:
    """This rank's share of each global batch of an epoch, read ahead by a thread.

    `samples_done` samples are walked through and not used.

    Raises TrainingError, on every rank, if not the same came on all, or nothing at all.
    """
    reading = Reading(draw, options.on_error == "skip", options.collate, world.device)
    samples = _samples(dataset, epoch, samples_done, reading)
    loading = read_ahead(_cuts(samples, options, world, reading), reading)
    scaling = share.normalization_of(dataset, world.device, normalization)
    asked, is_empty = time.perf_counter(), samples_done == 0
    with closing(loading):
        for cut in awaited(loading):
            _compare(cut, world, epoch)
            if cut is None:  # the same on all ranks, or `_compare` would have raised
                if is_empty:
                    raise TrainingError(
                        f"the stream {type(dataset).__name__} gave no sample; if it was walked "
                        "through before, let its __iter__ start over each time."
                    )
                return
            is_empty = False
            batch = cut.batch
            inputs, targets = batch.inputs, batch.targets
            if not batch.num:
                inputs, targets = cut.spare.inputs, cut.spare.targets
            inputs = moved("inputs", inputs, world.device)
            targets = moved("targets", targets, world.device)
            inputs, targets = share.halves(inputs, targets, form, scaling)
            yield Share(
                inputs=inputs,
                targets=targets,
                num_here=batch.num,
                num_all=cut.num_all,
                wait_s=time.perf_counter() - asked,
                skipped=batch.skipped,
                is_last=cut.is_last,
                part_sizes=cut.part_sizes,
            )
            if cut.is_last:  # to compare what comes after it would cost one more all-reduce
                return
            asked = time.perf_counter()


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


def _cuts(
    samples: Iterator[Any], options: TrainingOptions, world: World, reading: Reading
) -> Generator[_Cut | None, None, None]:
    """The global batches; None for ever after the last one."""
    batch_size = options.batch_size
    # One batch ahead, as only that shows whether a batch is the last one of the epoch.
    ahead = list(islice(samples, batch_size))
    spare = Batch(None, None, 0)
    while ahead:
        chunk, ahead = ahead, list(islice(samples, batch_size))
        read = [sample for sample in chunk if not isinstance(sample, Skipped)]
        if read:  # the placeholder of a rank whose share of this batch is empty
            spare = batch_of(read[:1], reading.pin, reading.collate)
        if not spare.num:
            raise TrainingError(
                f"none of the first {len(chunk):,} samples of the stream could be read."
            )
        # The whole batch was walked through; only this rank's share of it is collated and kept.
        places, num_parts = np.arange(len(chunk)), share.parts_of_batch(options)
        mine, sizes = shards.shard_in_parts(places, world.rank, world.size, num_parts)
        here = [chunk[place] for place in mine]
        batch = batch_of(here, reading.pin, reading.collate)
        yield _Cut(batch, spare, len(chunk), _checksum(read), not ahead, sizes)
    while True:  # a rank whose stream is shorter still takes part in the others' comparison
        yield None


def _checksum(samples: list[Any]) -> int:
    """Of the targets, which are small: in which order they came, and which.

    Of samples that are no pairs, of all that is in them.
    """
    checksum = 0
    for sample in samples:
        is_pair = isinstance(sample, (tuple, list)) and len(sample) == 2
        target = sample[1] if is_pair else sample
        found = list(tensors(target))
        parts = [t.cpu().double().numpy().tobytes() for t in found] or [repr(target).encode()]
        for part in parts:
            checksum = zlib.crc32(part, checksum)
    return checksum & 0xFFFFFF  # so that sums of squares are exact


def _compare(cut: _Cut | None, world: World, epoch: int) -> None:
    """Raises TrainingError, on every rank, if the ranks have not read the same."""
    if world.size == 1:
        return
    number = cut.num_all if cut else 0
    own = (number, cut.checksum, cut.is_last) if cut else (0, 0, True)
    here = torch.tensor(own, dtype=torch.float64, device=world.device)
    # All are equal exactly if the variance is 0, which one sum over the ranks shows.
    squares = torch.stack([here, here * here])
    mean, square = (world.sum(squares) / world.size).tolist()
    if all(m * m == s for m, s in zip(mean, square, strict=True)):
        return
    # Only now, and on all ranks alike, they gather what came where.
    what = _difference(world.gather((number, cut is None or cut.is_last)))
    raise TrainingError(
        f"epoch {epoch}: the stream is not the same on every rank, {what}. Let it "
        "shuffle by the epoch (set_epoch) or by torch's random numbers, and not split itself by "
        "rank: gpupool does that."
    )


def _difference(came: list[tuple[int, bool]]) -> str:
    """What to say of the number of samples of each rank's batch, and whether it is its last."""
    if len({number for number, _ in came}) > 1:
        numbers = ", ".join(f"{number:,} on rank {rank}" for rank, (number, _) in enumerate(came))
        return f"another number of samples came in one batch ({numbers})"
    if len({is_last for _, is_last in came}) > 1:
        longer = ", ".join(str(rank) for rank, (_, is_last) in enumerate(came) if not is_last)
        return f"it is longer on rank {longer}"
    return "other samples came in one batch"
