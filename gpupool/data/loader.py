"""Batches for one rank, read ahead while the step before computes. Runs on engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import default_collate

from gpupool.core.errors import DataError
from gpupool.data.shards import Indices

Batch = tuple[Any, Any]  # inputs and targets, each with the batch as first dimension


def load_batches(
    dataset: Any,
    batches: Sequence[Indices],
    *,
    depth: int = 2,
    device: torch.device | str = "cpu",
) -> Generator[Batch | None, None, None]:
    """For each entry of `batches`, in order, its samples as (inputs, targets); None if it is empty.

    One background thread reads up to `depth` batches ahead, starting with the first `next()`; with
    `depth` 0 the caller's thread reads each when it is asked for, which a debugger can follow.
    Tensors stay in CPU memory, pinned if `device` is a CUDA device. What the thread raises is
    raised by the `next()` of that batch. Closing the iterator, also by an exception or by leaving
    the last reference, ends the thread as soon as the read under way returns.

    Raises DataError if the images of a batch differ in size, or a sample is not a pair.
    """
    device = torch.device(device)
    pin = device.type == "cuda"
    if depth == 0:
        yield from (_load(dataset, indices, pin) for indices in batches)
        return
    reader = ThreadPoolExecutor(1, "gpupool-loader", initializer=_use_device, initargs=(device,))
    ahead: deque[Future[Batch | None]] = deque()
    remaining = iter(batches)

    def read_one_more() -> None:
        for indices in remaining:
            ahead.append(reader.submit(_load, dataset, indices, pin))
            return

    try:
        for _ in range(depth):
            read_one_more()
        while ahead:
            batch = ahead.popleft().result()
            read_one_more()
            yield batch
    finally:
        # Not waiting: a stop by the user must not hang on a store that does not answer.
        reader.shutdown(wait=False, cancel_futures=True)


def _use_device(device: torch.device) -> None:
    """The current CUDA device belongs to a thread; pinning would open a context on GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _load(dataset: Any, indices: Indices, pin: bool) -> Batch | None:
    if len(indices) == 0:
        return None
    places = [int(index) for index in indices]
    if hasattr(dataset, "__getitems__"):
        samples = dataset.__getitems__(places)
    else:
        samples = [dataset[place] for place in places]
    batch = _collate(samples)
    return (_pinned(batch[0]), _pinned(batch[1])) if pin else batch


def _collate(samples: Sequence[Any]) -> Batch:
    for sample in samples:
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise DataError(
                f"a sample must be a pair (input, target), not {type(sample).__name__}; "
                "change what the dataset's __getitem__ returns"
            )
    shapes = {tuple(x.shape) for x, _ in samples if isinstance(x, torch.Tensor)}
    if len(shapes) > 1:
        raise DataError(
            f"the images of one batch differ in size ({_some(shapes)}); give them one size with "
            "ds.with_transform(torchvision.transforms.v2.Resize((height, width)))"
        )
    inputs, targets = default_collate(list(samples))
    return inputs, targets


def _some(shapes: set[tuple[int, ...]]) -> str:
    shown = [" x ".join(map(str, shape)) for shape in sorted(shapes)[:3]]
    return ", ".join(shown) + (", ..." if len(shapes) > 3 else "")


def _pinned(value: Any) -> Any:
    """`value` with its tensors in page-locked memory, which the GPU copies while it computes."""
    if isinstance(value, torch.Tensor):
        return value.pin_memory()
    if isinstance(value, dict):
        return {name: _pinned(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_pinned(item) for item in value]
    return value
