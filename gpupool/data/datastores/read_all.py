"""A whole datastore in memory. Runs anywhere; imports torch."""

from __future__ import annotations

from typing import Any

import torch

from gpupool.core.errors import DataError, OptionsError
from gpupool.core.progress import progress
from gpupool.data.reading.samples import Samples, read_samples

_CHUNK = 256  # samples read at once, beside the result


def read_all(dataset: Samples, limit_gib: float) -> tuple[torch.Tensor, torch.Tensor]:
    """All inputs and all targets, stacked; see `Datastore.read_all`."""
    total = len(dataset)
    if total == 0:
        raise OptionsError(f"{dataset!r} is empty: there is nothing to read", "empty")
    # One sample says how much memory all of them take, before any is allocated.
    first = [_tensor(part) for part in read_samples(dataset, [0])[0]]
    needed_gib = total * sum(part.nbytes for part in first) / 2**30
    if needed_gib > limit_gib:
        raise OptionsError(
            f"{total:,} samples of {_shape(first[0])} would take {needed_gib:,.1f} GiB, above "
            f"limit_gib={limit_gib:g}; take a subset, make them smaller with with_transform, or "
            "raise limit_gib",
            "too large",
            "limit_gib",
        )
    # Filled in place: stacking a list would need the memory twice.
    inputs, targets = (torch.empty((total, *part.shape), dtype=part.dtype) for part in first)
    with progress("Reading", total, "images") as bar:
        for start in range(0, total, _CHUNK):
            places = range(start, min(start + _CHUNK, total))
            for place, sample in zip(places, read_samples(dataset, places), strict=True):
                _put(inputs, place, sample[0])
                _put(targets, place, sample[1])
            bar.update(places.stop)
    return inputs, targets


def _put(stacked: torch.Tensor, place: int, value: Any) -> None:
    row = _tensor(value)
    # The assignment alone would broadcast a smaller sample, and convert another type, silently.
    if row.shape != stacked.shape[1:] or row.dtype != stacked.dtype:
        raise DataError(
            f"sample {place} is {_shape(row)}, sample 0 was {_shape(stacked[0])}; give them one "
            "size with ds.with_transform(torchvision.transforms.v2.Resize((height, width)))",
            "sizes",
        )
    stacked[place] = row


def _tensor(value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"read_all puts tensors, arrays and numbers together, not {type(value).__name__}; "
            f"change what the transform returns ({error})",
            "type",
        ) from None


def _shape(value: torch.Tensor) -> str:
    kind = str(value.dtype).removeprefix("torch.")
    return f"{' x '.join(map(str, value.shape)) or 'one number'} {kind}"
