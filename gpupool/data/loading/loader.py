"""Batches for one rank, read ahead while the step before computes. Runs on engines."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from gpupool.data import device as devices
from gpupool.data.loading.ways import read_on_cpu
from gpupool.data.reading.collate import Batch, Collate
from gpupool.data.reading.pipeline import MAX_BYTES_IN_FLIGHT, Reading
from gpupool.data.reading.samples import Draw
from gpupool.data.reading.shards import Indices


def load_batches(
    dataset: Any,
    batches: Sequence[Indices],
    *,
    depth: int = 2,
    device: torch.device | str = "cpu",
    draw: Draw | None = None,
    skip: bool = False,
    max_bytes: int = MAX_BYTES_IN_FLIGHT,
    collate: Collate | None = None,
    workers: int | None = None,
) -> Generator[Batch | None, None, None]:
    """For each entry of `batches`, in order, its samples as a `Batch`; None if it is empty.

    A data set of ours (`Samples`) is fetched by many threads and decoded by as many as this process
    has cores (`torch.get_num_threads()`): `depth` batches ahead, and further where batches are too
    small to keep the threads busy. Another one is read by `workers` threads or processes, which
    `ways.py` chooses. Reading starts with the first `next()`. With `depth` 0 the caller's thread
    reads each batch when it is asked for, which a debugger can follow.

    Tensors stay in CPU memory, pinned if `device` is a CUDA device; inputs that it decodes itself
    (`ds.decoded_on`) lie there. `draw` keys the random numbers of augmentation, see `keyed_draws`.
    `skip` leaves out samples that raise SampleError and lists them in the batch. `max_bytes` bounds
    what has been fetched and not yet decoded. `collate` makes a batch of a list of samples.

    What a thread raises is raised by the `next()` of that batch. Closing the iterator, also by an
    exception or by leaving the last reference, ends the threads; those that wait for a store end
    when it answers.

    Raises DataError if the images of a batch differ in size, OptionsError if they shall be decoded
    on a GPU and `device` is none.
    """
    reading = Reading(depth, devices.of(device).device, draw, skip, max_bytes, collate, workers)
    # "auto" is the CPU until somebody has measured on a GPU which one is faster.
    if getattr(dataset, "decoding", "cpu") == "cuda":
        from gpupool.data.reading.gpu_decode import (  # and with it torchvision
            read_on_gpu,
            require_decoder,
        )

        require_decoder(reading.device)
        return read_on_gpu(dataset, batches, reading)
    return read_on_cpu(dataset, batches, reading)
