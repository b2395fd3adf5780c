"""This rank's share of every batch of a data set that has an index. Runs on engines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpupool.core.errors import TrainingError
from gpupool.data.reading import shards
from gpupool.data.reading.collate import Batch, Collate
from gpupool.data.reading.loader import load_batches
from gpupool.data.reading.normalization import Normalization
from gpupool.data.reading.samples import Draw
from gpupool.data.reading.shards import Indices
from gpupool.data.reading.subsets import opened
from gpupool.data.reading.trees import map_tensors, rows
from gpupool.data.stores.waiting import awaited
from gpupool.engine.batches.form import PLAIN, BatchForm
from gpupool.engine.batches.share import Dataset, Share, halves, normalization_of
from gpupool.engine.batches.transfer import moved
from gpupool.engine.group.forming import World

_MAX_PLACEHOLDERS = 1000  # samples that are tried when not one of a share could be read


def load_shares(
    dataset: Dataset,
    batches: Sequence[Indices],
    world: World,
    draw: Draw | None = None,
    *,
    skip: bool = False,
    normalization: Normalization | None = None,
    num_parts: int = 1,
    collate: Collate | None = None,
    form: BatchForm = PLAIN,
    workers: int | None = None,
) -> Iterator[Share]:
    """This rank's share of each global batch, read ahead; as many on every rank.

    `num_parts`: into how many parts a batch is cut before; `collate` makes a batch of samples, and
    `form` says how it is used. `workers` as in `TrainingOptions`.
    """
    cuts = [shards.shard_in_parts(batch, world.rank, world.size, num_parts) for batch in batches]
    mine = [share for share, _ in cuts]
    loading = load_batches(
        dataset,
        mine,
        device=world.device,
        draw=draw,
        skip=skip,
        collate=collate,
        workers=workers,
    )
    scaling = normalization_of(opened(dataset), world.device, normalization)
    # A placeholder is needed where a share is empty, or may become so when samples are skipped.
    may_lack = skip or not all(map(len, mine))
    placeholder: tuple[Any, ...] | None = None
    with closing(loading):  # a traceback may hold this frame
        asked = time.perf_counter()
        pairs = zip(batches, awaited(loading), strict=True)
        for number, (batch, loaded) in enumerate(pairs, start=1):
            loaded = loaded or Batch(None, None, 0)
            inputs, targets = loaded.inputs, loaded.targets
            if may_lack and placeholder is None:
                # Made with the first batch, so that one is there whenever a share is empty.
                whole = loaded
                # Nobody can cut one sample out of what a user's function has made.
                if not loaded.num or collate is not None:
                    whole = _one_sample(dataset, batch, world.device, skip=skip, collate=collate)
                placeholder = one_of(whole, world.device)
            if loaded.num == 0 and placeholder is not None:
                inputs, targets = placeholder
            inputs = moved("inputs", inputs, world.device)
            targets = moved("targets", targets, world.device)
            inputs, targets = halves(inputs, targets, form, scaling)
            yield Share(
                inputs=inputs,
                targets=targets,
                num_here=loaded.num,
                num_all=len(batch),
                wait_s=time.perf_counter() - asked,
                skipped=loaded.skipped,
                is_last=number == len(batches),
                part_sizes=cuts[number - 1][1],
            )
            # the step in between is no wait for data
            del inputs, targets, loaded
            asked = time.perf_counter()


def one_of(batch: Batch, device: torch.device) -> tuple[Any, Any]:
    """Inputs and targets of the first sample of a batch, as a batch of one."""
    # A clone: a view would keep the whole batch alive for as long as the training lasts.
    named = ("inputs", batch.inputs), ("targets", batch.targets)
    inputs, targets = (
        map_tensors(Tensor.clone, moved(name, rows(half, 0, 1, batch.num), device))
        for name, half in named
    )
    return inputs, targets


def _one_sample(
    dataset: Dataset,
    batch: Indices,
    device: torch.device,
    *,
    skip: bool,
    collate: Collate | None = None,
) -> Batch:
    """Any sample, as a batch of one, for a rank that has none of its own."""
    # Without skipping one try is enough: what is wrong with that sample is raised.
    others = islice(chain(batch, range(len(dataset))), _MAX_PLACEHOLDERS if skip else 1)
    tried = [np.array([index], dtype=np.int64) for index in others]
    reading = load_batches(dataset, tried, depth=0, device=device, skip=skip, collate=collate)
    for loaded in awaited(reading):
        if loaded is not None and loaded.num:
            return loaded
    raise TrainingError(
        f"none of {len(tried):,} samples could be read, so there is nothing to train on; "
        "on_error='raise' says what is wrong with the first of them."
    )
