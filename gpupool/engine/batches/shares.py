"""This rank's share of every global batch of an epoch, on its device. Runs on engines.

(seed, epoch) alone decide which samples are in which batch, so that a training that resumes finds
its place on any ranks. Of a data set with an index each rank reads its own samples. A stream every
rank walks through whole, cuts it into the same global batches and keeps its share of each; so it
has to be the same on every rank. One that shuffles must do so by the epoch (`set_epoch(epoch)` is
called if it has that) or by torch's random numbers, which are keyed here; one that splits itself by
rank must not. Each batch of it costs one small all-reduce, in which the ranks compare what came.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from gpupool.core.errors import DataError, OptionsError, TrainingError
from gpupool.core.network import Scaling
from gpupool.core.options.datasets import LABELS, in_order, is_stream
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data.reading import shards
from gpupool.data.reading.augmentation import keyed_draws
from gpupool.data.reading.batches import Batch, Reading, Rows, batch_of
from gpupool.data.reading.inputs import opened
from gpupool.data.reading.loader import load_batches
from gpupool.data.reading.samples import Draw, Skipped
from gpupool.data.reading.shards import Indices
from gpupool.data.reading.threads import read_ahead
from gpupool.data.reading.trees import first_tensor, map_tensors, remade, tensors
from gpupool.data.stores.retry import awaited
from gpupool.engine.batches.form import PLAIN, BatchForm
from gpupool.engine.group.forming import World

_MAX_TRIED = 1000  # samples, when not one of a share could be read

Scales = tuple[Tensor, Tensor]  # mean and standard deviation of each channel, float64
Moments = tuple[int, Tensor, Tensor]  # how many values a channel has, their mean and variance


class Dataset(Protocol):
    """A map-style data set: what `torch.utils.data.Dataset` asks for."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


def num_samples(dataset: Dataset) -> int:
    """How many samples an epoch has; 0 if that is not known, of a stream without `len()`."""
    try:
        return len(dataset)
    except TypeError:  # also of a map-style data set whose `__len__` is wrong: that is an error
        if is_stream(dataset):
            return 0
        raise


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's share of a global batch.

    A rank whose share is empty still takes part, because every rank must take every step: it holds
    one sample with `num_here` 0, which gives its loss the weight 0. `num_all` counts the samples of
    the global batch, also those in `skipped`, which could not be read. `part_sizes`: how many of
    the samples belong to each part of the global batch, where that was cut before it was divided.
    """

    inputs: Any
    targets: Any
    num_here: int
    num_all: int
    skipped: tuple[Skipped, ...] = ()
    is_last: bool = False
    part_sizes: tuple[int, ...] = ()


def epoch_shares(
    dataset: Dataset,
    options: TrainingOptions,
    world: World,
    epoch: int,
    samples_done: int = 0,
    draw: Draw | None = None,
    normalization: Scaling | None = None,
    form: BatchForm = PLAIN,
) -> Iterator[Share]:
    """This rank's share of each global batch of an epoch, after its first `samples_done` samples.

    They are read ahead, and as many on every rank. `draw` keys the random numbers of augmentation,
    (seed, epoch) unless given. Inputs get the `normalization`, or that of the data set.
    """
    draw = draw or Draw(options.seed, epoch)
    read = _stream_shares if is_stream(dataset) else _indexed_shares
    scaling = normalization_of(opened(dataset), world.device, normalization)
    # Closed here, as a traceback may hold this frame.
    with closing(read(dataset, options, world, epoch, samples_done, draw)) as shares:
        for share in shares:
            inputs, targets = _on_device(share, world, form, scaling)
            yield replace(share, inputs=inputs, targets=targets)
            del share, inputs, targets


def _cut(batch: Indices, world: World, options: TrainingOptions) -> tuple[Indices, tuple[int, ...]]:
    # With batch norms over all ranks a micro-batch must have the same samples for any number of
    # ranks. Without them any cut gives the same gradient, so each rank cuts its own share.
    num_parts = options.accumulate if options.batch_norm == "sync" else 1
    return shards.shard_in_parts(batch, world.rank, world.size, num_parts)


# ---- of a data set with an index --------------------------------------------------------------


def epoch_batches(
    dataset: Dataset, options: TrainingOptions, epoch: int, samples_done: int = 0
) -> list[Indices]:
    """The global batches of an epoch, but for `samples_done`, as indices: the same for any ranks.

    Where a sample comes for the (k + 1)th time in the epoch, its index is k times the length of the
    data set larger.

    Raises TrainingError if the data set orders its epochs itself, and not each sample comes once.
    """
    num, shuffled_epoch = len(dataset), 1 if options.shuffle == "once" else epoch
    shuffles, weights = options.shuffle != "never", options.weights
    if shuffles and hasattr(dataset, "epoch_order"):
        # Patches of one image stay together, for example; a sample left out would go unnoticed.
        order = dataset.epoch_order(options.seed, shuffled_epoch, options.batch_size)
        if not shards.is_permutation(order, num):
            raise TrainingError(
                f"epoch_order() of the {type(dataset).__name__} does not name each of its {num:,} "
                "samples once; correct it, or take it away."
            )
    else:
        numbers: Any = weights  # by now
        order = shards.epoch_order(num, options.seed, shuffled_epoch, shuffles, weights=numbers)
        # Rows of tensors draw no random numbers, and are gathered by their plain indices.
        if weights is not None and type(dataset) is not TensorDataset:
            order = _numbered(order, num)
    return shards.global_batches(order, options.batch_size, samples_done)


def _numbered(order: Indices, num: int) -> Indices:
    by_index = np.argsort(order, kind="stable")
    ordered = order[by_index]
    firsts = np.searchsorted(ordered, ordered)  # where those with the same index begin
    numbered = np.empty_like(order)
    numbered[by_index] = ordered + num * (np.arange(len(order)) - firsts)
    return numbered


def _indexed_shares(
    dataset: Any, options: TrainingOptions, world: World, epoch: int, samples_done: int, draw: Draw
) -> Generator[Share, None, None]:
    batches = epoch_batches(dataset, options, epoch, samples_done)
    cuts = [_cut(batch, world, options) for batch in batches]
    pairs = zip(batches, cuts, strict=True)
    # A rank without samples of its own takes part with the first one of the batch.
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
        for batch, (mine, sizes), loaded in zip(batches, cuts, awaited(loading), strict=True):
            if not loaded.num and spare is None:
                spare = _any_sample(dataset, batch, options, world)
            held = loaded if loaded.num or spare is None else spare
            num, skipped = (loaded.num, loaded.skipped) if len(mine) else (0, ())
            is_last = batch is batches[-1]
            yield Share(held.inputs, held.targets, num, len(batch), skipped, is_last, sizes)


def _any_sample(dataset: Dataset, batch: Indices, options: TrainingOptions, world: World) -> Batch:
    """A batch of one, for a rank not one of whose samples could be read."""
    others = islice(chain(batch, range(len(dataset))), _MAX_TRIED)
    tried = [np.array([index]) for index in others]
    rows = Rows(opened(dataset))
    # Not keyed: for that it would set generators that the threads watch.
    reading = Reading(skip=True, collate=options.collate, device=world.device)
    for loaded in awaited(rows.batch(index, reading) for index in tried):
        if loaded.num:
            return loaded
    raise TrainingError(
        f"no sample could be read in {len(tried):,} tries, so there is nothing to train on; "
        "on_error='raise' says what is wrong with the first of them."
    )


# ---- of a stream ------------------------------------------------------------------------------


def _stream_shares(
    dataset: Any, options: TrainingOptions, world: World, epoch: int, samples_done: int, draw: Draw
) -> Generator[Share, None, None]:
    """A thread reads ahead. Raises TrainingError, on every rank, if not the same came on all, or
    nothing at all."""
    reading = Reading(draw, options.on_error == "skip", options.collate, world.device)
    samples = _samples(dataset, epoch, samples_done, reading)
    loading = read_ahead(_shares_of_stream(samples, options, world, reading), reading)
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
        if sample is None:  # for ranks count what comes, not what a function leaves of it
            what = f"sample {number} of the stream is None: let it leave out what it cannot read"
            raise DataError(what, "no sample")
        number += 1
        if number > samples_done:
            yield sample


def _shares_of_stream(
    samples: Iterator[Any], options: TrainingOptions, world: World, reading: Reading
) -> Generator[tuple[Share | None, int], None, None]:
    """The share of each global batch, with a checksum of the whole; one None if nothing comes."""
    # One batch ahead, as only that shows whether a batch is the last one of the epoch.
    ahead = list(islice(samples, options.batch_size))
    if not ahead:
        yield None, 0
    while ahead:
        came, ahead = ahead, list(islice(samples, options.batch_size))
        mine, sizes = _cut(np.arange(len(came)), world, options)
        # A rank without samples of its own takes part with the first one of the batch.
        held = [came[place] for place in mine] or came[:1]
        inputs, targets, _, _ = batch_of(held, reading.pin, reading.collate)
        share = Share(inputs, targets, len(mine), len(came), is_last=not ahead, part_sizes=sizes)
        yield share, _checksum(came, share.is_last)


def _checksum(samples: list[Any], is_last: bool) -> int:
    """Of the targets of a batch, which are small; of samples that are no pairs, of all in them."""
    targets = [
        sample[1] if isinstance(sample, (tuple, list)) and len(sample) == 2 else sample
        for sample in samples
    ]
    parts = [tensor.cpu().double().numpy().tobytes() for tensor in tensors(targets)]
    content = b"".join(parts) or repr(targets).encode()
    # Of few bits, so that squares are exact.
    return zlib.crc32(content + repr((len(samples), is_last)).encode()) & 0xFFFFF


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


# ---- on the device ----------------------------------------------------------------------------


def _on_device(
    share: Share, world: World, form: BatchForm, scaling: Scales | None
) -> tuple[Any, Any]:
    inputs = _moved("inputs", share.inputs, world.device)
    if share.targets is not None:
        targets = _moved("targets", share.targets, world.device)
        return form.halves(as_input(inputs, scaling), targets)
    if isinstance(inputs, Mapping):  # labels may be uint8 as well
        columns = {
            name: part if name in LABELS else as_input(part, scaling)
            for name, part in inputs.items()
        }
        return form.halves(remade(inputs, columns), None)
    chosen, batch = form.halves(inputs, None)
    return as_input(chosen, scaling), batch


def _moved(name: str, half: Any, device: torch.device) -> Any:
    """An object of the user's goes there by its own `to(device)`, as a batch of graphs does."""
    if first_tensor(half) is not None or type(half) is dict:
        # From pinned memory the host does not wait for the copy.
        return map_tensors(partial(Tensor.to, device=device, non_blocking=True), half)
    if callable(getattr(half, "to", None)):
        return half.to(device)
    raise DataError(
        f"the {name} of a batch are a {type(half).__name__}, not a tensor; change what the "
        "transform or the data set returns",
        "no tensor",
    )


def as_input(images: Any, scaling: Scales | None = None) -> Any:
    """uint8 images as float32 in 0..1, made on the device; anything else as it is; contiguous.

    Floating-point ones too are scaled after that. Of a dict or list that is done with each tensor
    in it. Raises DataError if the scaling is of other channels.
    """
    if not isinstance(images, Tensor):
        return map_tensors(partial(as_input, scaling=scaling), images)
    if images.dtype == torch.uint8:  # a quarter of the bytes have crossed to the device
        images = images.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    images = images.contiguous()
    if scaling is None:
        return images
    if len(scaling[0]) > 1 and images.shape[1] != len(scaling[0]):  # torch would make 3 of one
        raise DataError(
            f"the normalization has {len(scaling[0])} channels, the images have "
            f"{images.shape[1]}; give with_normalization one number each, or as many as the images "
            "have channels",
            "channels",
        )
    # In the inputs' own precision: float64 inputs stay float64.
    mean, std = (one.to(images.dtype).view(-1, *[1] * (images.ndim - 2)) for one in scaling)
    return (images - mean).div_(std)


# ---- normalization ----------------------------------------------------------------------------


def normalization_of(
    dataset: Dataset, device: torch.device, normalization: Scaling | None = None
) -> Scales | None:
    """A normalization, or the one that a data set asks for, on the device; None without any."""
    asked = normalization or getattr(dataset, "normalization", None)
    if asked is None:
        return None
    mean, std = (torch.tensor(values, dtype=torch.float64, device=device) for values in asked)
    return mean, std


def fit_scaling(
    dataset: Dataset, options: TrainingOptions, world: World, form: BatchForm
) -> Scaling:
    """Mean and standard deviation of each channel of all inputs; one pass, by all ranks together.

    Of inputs (N, channels, ...), uint8 ones in 0..1. Raises OptionsError if the inputs are no
    single tensor, or are normalised already.
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


def _joined(parts: list[Moments]) -> Moments:
    nums = torch.tensor([num for num, _, _ in parts], dtype=torch.float64)
    means = torch.stack([mean for _, mean, _ in parts])
    variances = torch.stack([variance for _, _, variance in parts])
    shares = (nums / nums.sum())[:, None]
    mean = (means * shares).sum(0)
    return int(nums.sum()), mean, ((variances + (means - mean).square()) * shares).sum(0)
